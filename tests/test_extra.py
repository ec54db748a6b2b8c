"""Options of DeepSpeed and vLLM that have no name here: each is checked before anything loads. That they arrive is
shown where the real ones run: tests/programs/update_program.py and sync_program.py give one each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from grpo.config_file import load_config
from grpo.model.zero import check_extra, deepspeed_config
from launch.train import check_inputs
from tests.small_run import prepare
from tests.torchrun import QUIET


def check_deepspeed(tmp_path, extra, **changes):
    config = load_config(prepare(tmp_path, deepspeed__extra=extra, **changes))
    check_extra(config.model, config.optimizer, config.deepspeed)
    return deepspeed_config(config.model, config.optimizer, config.deepspeed)


def test_deepspeeds_options_join_ours_section_by_section(tmp_path):
    extra = {"zero_optimization": {"reduce_bucket_size": 1000}, "wall_clock_breakdown": True}
    merged = check_deepspeed(tmp_path, extra, deepspeed__stage=2)
    assert merged["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 1000}
    assert merged["wall_clock_breakdown"] is True and merged["gradient_clipping"] == 1.0


def test_an_optimizer_that_is_offloaded_may_be_ours(tmp_path):
    extra = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    assert check_deepspeed(tmp_path, extra, deepspeed__stage=3)["zero_force_ds_cpu_optimizer"] is False
    assert "zero_force_ds_cpu_optimizer" not in check_deepspeed(tmp_path, {}, deepspeed__stage=3)


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({"wall_clock_brakdown": True}, "wall_clock_brakdown: DeepSpeed has no such key; did you mean 'wall"),
        ({"flops_profiler": {"enabled": True, "profile": 1}}, "flops_profiler.profile: DeepSpeed has no such key; d"),
        ({"zero_optimization": {"reduce_bucket_sise": 5}}, "no such key; did you mean 'reduce_bucket_size'"),
        ({"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}}, "optimizer.devise: there is no such"),
        ({"zero_optimization": {"reduce_bucket_size": "much"}}, "reduce_bucket_size: input should be a valid integer"),
        ({"checkpoint": {"tag_validation": "loud"}}, "contains invalid tag_validation"),
        ({"communication_data_type": "bf16"}, "is not for extra; set deepspeed.communication_dtype"),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage: is not for extra; set deepspeed.stage"),
        ({"gradient_clipping": 2.0}, "gradient_clipping: is not for extra; set optimizer.max_grad_norm"),
        ({"optimizer": {"type": "Lion"}}, "deepspeed.extra.optimizer: is not for extra; set the section optimizer"),
        ({"fp16": {"enabled": True}}, "deepspeed.extra.fp16: is not for extra; set model.dtype instead"),
        ({"steps_per_print": 1}, "deepspeed.extra.steps_per_print: is not for extra; it is fixed, remove it"),
        ({"prescale_gradients": True}, "deepspeed.extra.prescale_gradients: is not for extra; it is fixed, remove it"),
    ],
)
def test_what_deepspeed_does_not_know_or_we_set_is_refused(tmp_path, extra, told):
    with pytest.raises(ValueError) as error:
        check_deepspeed(tmp_path, extra)
    assert told in str(error.value)


def test_training_checks_deepspeeds_options_before_anything_loads(tmp_path):
    with pytest.raises(ValueError, match="did you mean 'wall_clock_breakdown'"):
        check_inputs(load_config(prepare(tmp_path, deepspeed__extra={"wall_clock_brakdown": True})))


def test_options_of_an_engine_that_is_not_taken_are_told(tmp_path, capsys):
    check_inputs(load_config(prepare(tmp_path, engine__extra={"max_logprobs": 3})))
    assert "engine.extra has no effect" in capsys.readouterr().out
    address = {"base_url": "http://127.0.0.1:9/v1", "weights_folder": str(tmp_path)}
    remote = {"kind": "remote", "max_context_tokens": 192, "extra": {"max_logprobs": 3}} | address
    assert any("engine.extra" in note for note in load_config(prepare(tmp_path, engine=remote)).without_effect())


ENGINE_CASES = [
    ({"max_logprobs": 3, "generation_config": "vllm"}, "accepted"),
    ({"max_logprob": 3}, "engine.extra.max_logprob: vLLM's engine has no such argument; did you mean 'max_logprobs'?"),
    ({"max_model_len": 3}, "engine.extra.max_model_len: is not for extra; set engine.max_context_tokens instead"),
    ({"tokenizer": "x"}, "engine.extra.tokenizer: is not for extra; set model.path instead"),
    ({"logprobs_mode": "raw_logits"}, "engine.extra.logprobs_mode: is not for extra; it is fixed, remove it"),
    ({"tensor_parallel_size": 2}, "every rank has an engine of its own"),
    ({"kv_cache_dtype": "fp9"}, "engine.extra: vLLM refuses it: CacheConfig.cache_dtype: Input should be"),
]
PROGRAM = """
import json, sys, torch
from pathlib import Path
from rollout.engines.vllm import check_extra
from rollout.settings import EngineSettings
for extra in json.loads(sys.argv[2]):
    try:
        check_extra(EngineSettings(max_context_tokens=192, extra=extra), Path(sys.argv[1]), torch.float32)
        print("TOLD accepted")
    except ValueError as error:
        print("TOLD " + str(error).split("\\n")[0])
"""


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_what_vllm_does_not_know_or_we_set_is_refused(tmp_path):
    prepare(tmp_path)
    extras = json.dumps([extra for extra, _ in ENGINE_CASES])
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "model"), extras]  # by itself, since vLLM patches torch
    done = subprocess.run(command, env=os.environ | QUIET, capture_output=True, text=True, timeout=200)
    told = [line.removeprefix("TOLD ") for line in done.stdout.splitlines() if line.startswith("TOLD ")]
    assert len(told) == len(ENGINE_CASES), done.stdout[-2000:] + done.stderr[-4000:]
    for line, (extra, expected) in zip(told, ENGINE_CASES, strict=True):
        assert expected in line, extra
