"""The next step's batch, sampled while this one is trained on: which weights it came from, and who may."""

from __future__ import annotations

import asyncio
import json
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo.background import LoopThread
from grpo.config_file import load_config
from grpo.run.recorder import read_rows
from launch.train import check_inputs
from rollout.settings import EngineSettings
from tests.small_run import SmallRun, prepare

STEPS = 4
OVERLAPPED = {
    "run__steps": STEPS,
    "rollout__prompts_per_step": 3,  # two ranks split the third group
    "run__save_every": 1,
    "evaluation__every": 1,
    "rollout__overlap": "one_step",
    "rollout__train_on": "all_replies",
    "rollout__dynamic_sampling": {"max_rounds": 1},
    "loss__correction": "token",
    # Adam divides by the size of a gradient: rounding of tiny ones would count in full, and flip a token on two ranks.
    "optimizer__eps": 1e-3,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same run on one rank and on two."""
    finished = {}
    for num_ranks in (1, 2):
        folder = tmp_path_factory.mktemp(f"ranks_{num_ranks}")
        config = prepare(folder, data__validation=str(folder / "held_out.jsonl"), **OVERLAPPED)
        with SmallRun(config, num_ranks, module="tests.programs.overlap_program") as run:
            assert run.wait() == 0, run.output
            assert not run.processes()
        finished[num_ranks] = run
    return finished


def weights(folder: Path, version: int):
    return AutoModelForCausalLM.from_pretrained(
        folder / "run" / "checkpoints" / f"step_{version:05}" if version else folder / "model", dtype=torch.float32
    )


@torch.no_grad()
def gap(model, replies) -> float:
    """Mean distance of the sampler's log-probs from those of `model`, nats."""
    gaps = []
    for reply in replies:
        ids = torch.tensor([reply["prompt_ids"] + reply["token_ids"]])
        start = len(reply["prompt_ids"]) - 1
        logprobs_TV = model(ids).logits[0, start:-1].log_softmax(-1)
        own_T = logprobs_TV.gather(-1, torch.tensor(reply["token_ids"])[:, None])[:, 0]
        gaps.append((own_T - torch.tensor(reply["logprobs"])).abs())
    return torch.cat(gaps).mean().item()


def test_the_recorded_version_is_the_one_whose_weights_sampled_the_batch(runs):
    run = runs[1]
    folder = run.folder.parent
    for step, version in zip(range(1, STEPS + 1), (0, 0, 1, 2), strict=True):  # of step - 2, from the second on
        kept = json.loads((folder / "sampled" / f"{step}_0.json").read_text())
        assert run.metrics[step - 1]["rollout/weight_version"] == kept["weight_version"] == version
        rows = read_rows(run.folder / "traces" / f"step_{step:05}.jsonl")
        assert {row["weight_version"] for row in rows} == {version}
        assert gap(weights(folder, version), kept["replies"]) < 1e-5
        if step > 1:
            assert gap(weights(folder, step - 1), kept["replies"]) > 1e-3  # the weights it is trained from


def test_each_batch_is_begun_before_the_update_on_the_one_before_it_ends(runs):
    order = ["started 1"]
    for step in range(1, STEPS + 1):
        order += [f"started {step + 1}"][: step < STEPS] + ["updated"]
    for num_ranks, run in runs.items():
        for rank in range(num_ranks):
            assert (run.folder.parent / f"order_{rank}.txt").read_text().splitlines() == order


def test_the_gap_is_held_to_rounding_where_the_batch_is_on_policy_and_measured_where_it_is_not(runs):
    gaps = [row["sampling/logp_gap_mean"] for row in runs[1].metrics]
    assert gaps[0] < 1e-5 and all(1e-3 < gap < 1 for gap in gaps[1:])


def test_two_ranks_overlap_as_one_does_and_evaluations_come_between_the_steps(runs):
    one, two = runs[1].metrics, runs[2].metrics
    for a, b in zip(one, two, strict=True):
        for name in ("rollout/weight_version", "reward/mean", "reply/length_mean", "update/grad_norm", "entropy"):
            assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-6), name
    for step in range(STEPS + 1):
        told = [read_rows(run.folder / "evaluations" / f"step_{step:05}.jsonl") for run in runs.values()]
        assert [row["messages"] for row in told[0]] == [row["messages"] for row in told[1]]


def test_coroutines_go_on_in_the_background_and_those_that_are_left_are_cancelled():
    ended = []

    async def wait_for_ever():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(threading.current_thread())

    async def fail():
        raise ValueError("told to whoever waits")

    with LoopThread() as loop:
        waiting = loop.start(wait_for_ever())
        with pytest.raises(ValueError, match="told to whoever waits"):
            loop.run(fail())
        assert not waiting.done() and not ended
    assert waiting.cancelled() and ended and ended[0] not in threading.enumerate()


def test_replies_of_older_weights_need_a_correction():
    with pytest.raises(ValueError, match="rollout.overlap: one_step trains on replies .* set loss.correction: token"):
        load_config(Path("configs/quickstart.yaml"), ["rollout.overlap=one_step"])
    load_config(Path("configs/quickstart.yaml"), ["rollout.overlap=one_step", "loss.correction=sequence"])


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_an_engine_on_a_gpu_may_not_sleep_while_it_samples(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = load_config(prepare(tmp_path, **OVERLAPPED))
    check_inputs(config)  # the transformers engine has no sleep
    config = load_config(prepare(tmp_path, engine__kind="vllm", **OVERLAPPED))
    with pytest.raises(ValueError, match="set engine.sleep=false"):
        check_inputs(config)
    check_inputs(config.model_copy(update={"engine": config.engine.model_copy(update={"sleep": False})}))
    address = {"base_url": "http://127.0.0.1:9/v1", "weights_folder": tmp_path}
    remote = EngineSettings(kind="remote", max_context_tokens=192, **address)
    with pytest.raises(ValueError, match="cannot be reached"):  # which is all that is wrong: it has a GPU of its own
        check_inputs(config.model_copy(update={"engine": remote}))
