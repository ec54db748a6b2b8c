"""Whole training runs: on a real vLLM server that plays user and judge, and on two ranks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo.run.recorder import read_rows
from tests.tiny import make_model
from tests.torchrun import QUIET

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


@pytest.fixture(scope="module")
def role_server(small_model, tmp_path_factory):
    """The address of a server that plays user and judge, as `launch/serve_roles.sh --small` starts it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("roles")
    environment = (
        os.environ
        | QUIET
        | {"USER_PORT": str(port), "LOG_DIR": str(log), "PYTHON": sys.executable, "OMP_NUM_THREADS": "2"}
    )
    with (log / "script.log").open("w") as output:
        script = subprocess.Popen(
            ["bash", "launch/serve_roles.sh", "--small"],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            address = f"http://127.0.0.1:{port}/v1"
            for _ in range(300):
                told = (log / "script.log").read_text()
                assert script.poll() is None, told
                if "serve_roles: ready" in told:
                    break
                time.sleep(1)
            else:
                pytest.fail(f"the server did not start: {told}")
            assert f"rewards.judge.base_url={address}" in told
            urllib.request.urlopen(f"{address}/models", timeout=10)  # ready it is
            yield address
        finally:
            script.terminate()
            assert script.wait(timeout=60) == 143
        with pytest.raises(OSError):  # nothing of it is left
            urllib.request.urlopen(f"{address}/models", timeout=1)


def config_file(folder: Path, model: Path, address: str) -> Path:
    role = {"base_url": address, "model": model.name, "max_tokens": 128, "max_attempts": 5, "timeout_s": 300}
    values = {
        "run": {"name": "judged", "folder": str(folder / "runs"), "steps": 2, "save_every": 1},
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train": "data/quickstart/rl_train.parquet", "validation": None},
        "engine": {"kind": "vllm", "max_context_tokens": 768},
        "rollout": {
            "prompts_per_step": 2,
            "group_size": 3,
            "continuations": 1,
            "max_reply_tokens": 200,
            "max_later_reply_tokens": 32,
            "max_user_turns": 1,
            "max_assistant_turns": 2,
            "user": {"kind": "llm", "endpoint": role},
        },
        "rewards": {
            "weights": {"bleu_score": 1.0, "interactivity": 1.0, "token_amount": -0.1},
            "truncated": 0.0,
            # Asked again, a judge at temperature 0 says much the same again.
            "judge": role | {"temperature": 0.0, "max_tokens": 400, "max_attempts": 2},
            "max_failure_rate": 0.5,  # of twelve conversations, a judge of this size fails in one or two
            "interactivity": {"by": "llm", "step": 0.5},
        },
        "loss": {"kl_coef": 0.001},
        "update": {"mini_batch_prompts": 1},
        "optimizer": {"lr": 1e-5},
        "deepspeed": {"stage": 0},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def train(*command: object, threads: str = "1") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env=os.environ | QUIET | {"OMP_NUM_THREADS": threads},
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.fixture(scope="module", autouse=True)
def data(small_model):
    subprocess.run(
        [
            sys.executable,
            "-m",
            "launch.prepare_data",
            "--articles",
            "configs/quickstart/articles.jsonl",
            "--held-out",
            "32",
            "--out",
            "data/quickstart",
        ],
        check=True,
    )


def test_two_steps_with_a_real_user_and_judge(role_server, small_model, tmp_path):
    done = train("-m", "launch.train", "--config", config_file(tmp_path, small_model, role_server))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    run = tmp_path / "runs" / "judged"
    steps = read_rows(run / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["sampling/logp_gap_mean"] < 1e-3
        assert step["kl"] >= 0
    assert sum(step["judge/failure_rate"] for step in steps) / 2 <= 0.5
    assert steps[-1]["total/judge/calls"] >= 2 and steps[-1]["total/judge/completion_tokens"] > 0
    rows = [row for step in (1, 2) for row in read_rows(run / "traces" / f"step_{step:05}.jsonl")]
    talked = [row for row in rows if row["ended"] not in ("length", "simulator_failed") or len(row["reply_tokens"]) > 1]
    assert talked, "no first reply ended by itself"
    judged = [row for row in talked if not row["score"]["failures"]]
    assert judged, "no conversation was judged without a failure"
    for row in judged:
        assert set(row["score"]["values"]) == {"bleu_score", "interactivity", "token_amount"}
        grades = row["score"]["notes"]["interactivity"]
        assert {grade["score"] for grade in grades.values()} <= {0, 0.5, 1}
    # The trained folder loads without anything of ours, and so does the checkpoint before it.
    before = AutoModelForCausalLM.from_pretrained(small_model).state_dict()
    after = AutoModelForCausalLM.from_pretrained(run / "model")
    assert AutoModelForCausalLM.from_pretrained(run / "checkpoints" / "step_00001")
    assert any(not torch.equal(weight, before[name]) for name, weight in after.state_dict().items())
    assert after.lm_head.weight.data_ptr() == after.model.embed_tokens.weight.data_ptr()
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(small_model).chat_template
    assert list((run / "tensorboard").iterdir())
    assert (run / "system_prompt.txt").read_text() == "You help people write short texts."  # of every row
    told = train("-m", "launch.report", run)
    assert told.returncode == 0 and "training reward" in told.stdout and "where things are" in told.stdout, told.stderr
    assert "so no comparison" in told.stdout  # nothing was held out
    assert "judge: " in told.stdout and " tokens read, " in told.stdout
    summary = json.loads((run / "summary.json").read_text())
    assert summary["totals"]["judge/calls"] == steps[-1]["total/judge/calls"]  # no evaluation came after
    assert summary["steps"] == 2 and summary["engine"] == "vllm"


def test_an_endpoint_that_does_not_answer_is_named_before_any_model_loads(small_model, tmp_path):
    done = train("-m", "launch.train", "--config", config_file(tmp_path, small_model, "http://127.0.0.1:9/v1"))
    assert done.returncode == 2
    assert "http://127.0.0.1:9/v1" in done.stderr and "rollout.user.endpoint.base_url" in done.stderr
    assert "loading the model" not in done.stdout


def test_two_ranks_train_the_same_policy_as_one(tmp_path):
    """ZeRO-3 with one vLLM engine per rank; scripted users, so that the text depends on the seeds alone."""
    model = make_model(tmp_path / "tiny")
    (tmp_path / "rows.jsonl").write_text(
        "".join(
            json.dumps({"prompt": f"hello what about the {w} ?", "reference": "bees hum ."}) + "\n"
            for w in ("bees", "roof", "winter", "about")
        )
    )
    settings = [
        f"model.path={model}", f"data.train={tmp_path}/rows.jsonl", "data.validation=null", f"run.folder={tmp_path}",
        "run.steps=2", "engine.max_context_tokens=256", "rollout.prompts_per_step=3", "rollout.group_size=4",
        "update.mini_batch_prompts=3", "optimizer.lr=1e-3", "optimizer.eps=1e-3", "loss.kl_coef=0.01",
        "loss.kl_placement=in_reward", "loss.correction=sequence", "loss.entropy_coef=0.001",
        "rollout.dynamic_sampling.max_rounds=1", "deepspeed.stage=3", "model.dtype=float32",
    ]  # fmt: skip
    launch = ["-m", "launch.train", "--config", "configs/quickstart.yaml", *settings]
    for name, command in (
        ("one", launch),
        ("two", ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *launch]),
    ):
        done = train(*command, f"run.name={name}")
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    one, two = (read_rows(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    for a, b in zip(one, two, strict=True):
        for key in ("reward/mean", "reply/length_mean", "kl", "entropy", "loss/policy", "update/grad_norm"):
            assert b[key] == pytest.approx(a[key], rel=1e-3, abs=1e-6), key
    texts = [
        {
            (r["scenario_id"], r["sample"]): r["messages"]
            for r in read_rows(tmp_path / n / "traces" / "step_00002.jsonl")
        }
        for n in ("one", "two")
    ]
    assert texts[0] == texts[1]
    states = [AutoModelForCausalLM.from_pretrained(tmp_path / name / "model").state_dict() for name in ("one", "two")]
    for name, weight in states[0].items():
        torch.testing.assert_close(states[1][name], weight, atol=1e-4, rtol=1e-3)
