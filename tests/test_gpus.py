"""GPUs that a run was not given, or cannot use, are told before anything loads. A program named nvidia-smi, first in
PATH, stands in for a machine with GPUs: its driver is too old for the CUDA that torch was built for, or something uses
them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from grpo.config_file import load_config
from grpo.model.room import check_own_gpu, state_bytes
from launch.train import check_inputs
from rollout.gpus import GPUFault, check_free, check_seen
from tests.small_run import prepare

H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Makes a machine whose nvidia-smi answers with `gpus` and `users`, the rows of its two questions, and ends with
    `code`; torch is as if built for `cuda`. Nobody hides the GPUs.
    """

    def make(gpus=(), users=(), code=0, cuda="13.0"):
        script = tmp_path / "bin" / "nvidia-smi"
        script.parent.mkdir(exist_ok=True)
        (tmp_path / "gpus.csv").write_text("".join(f"{row}\n" for row in gpus))
        (tmp_path / "users.csv").write_text("".join(f"{row}\n" for row in users))
        script.write_text(
            "#!/bin/sh\ncase $1 in\n"
            f"  --query-gpu*) cat {tmp_path}/gpus.csv ;;\n  *) cat {tmp_path}/users.csv ;;\nesac\nexit {code}\n"
        )
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        return script.parent

    return make


def gpu(index=0, *, driver="535.183.01", free=81000, name=H100):
    return f"{index}, GPU-aaaa{index}, {name}, {driver}, 81920, {free}"


def unseen() -> str:
    with pytest.raises(ValueError) as caught:
        check_seen()
    return str(caught.value)


without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU")


@without_gpu
def test_a_driver_too_old_for_torchs_cuda_is_named_with_the_one_that_is_needed(driver):
    driver([gpu(0), gpu(1)])
    told = unseen()
    assert "this machine has 2 GPUs, NVIDIA H100 80GB HBM3, and torch sees none" in told
    assert "built for CUDA 13.0, which needs NVIDIA driver 580.65.06 or newer, and 535.183.01 is installed" in told
    driver([gpu(0, driver="470.256.02")], cuda="12.8")
    assert "built for CUDA 12.8, which needs NVIDIA driver 525.60.13 or newer, and 470.256.02 is inst" in unseen()
    driver([gpu(0)], cuda="12.8")  # new enough: then torch's own words
    assert 'driver 535.183.01 is new enough for CUDA 12.8, and torch says "' in unseen()


@without_gpu
def test_a_torch_without_cuda_is_named_with_the_remedy(driver):
    driver([gpu()], cuda=None)
    told = unseen()
    assert f"torch {torch.__version__} is built without CUDA" in told and "pip install -e '.[gpu]'" in told


@without_gpu
def test_a_driver_that_was_updated_while_it_ran_asks_for_a_restart(driver):
    driver(users=["Failed to initialize NVML: Driver/library version mismatch"], code=18)
    assert "Restart the machine" in unseen()


@without_gpu
@pytest.mark.parametrize("hidden", ["", "-1", " ", "none"])
def test_gpus_that_were_hidden_on_purpose_are_not_asked_for(driver, monkeypatch, hidden):
    driver([gpu()])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    check_seen()


@without_gpu
def test_gpus_that_do_not_exist_are_told_apart_from_hidden_ones(driver, monkeypatch):
    driver([gpu(0), gpu(1)], cuda="12.8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert "CUDA_VISIBLE_DEVICES=4,5 names none of them (0 to 1)" in unseen()


@without_gpu
def test_a_machine_without_gpus_computes_on_its_cpu(driver, monkeypatch, tmp_path):
    driver(users=["NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."], code=9)
    check_seen()
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi at all
    check_seen()


@without_gpu
def test_training_stops_before_anything_loads_and_says_which_driver_it_needs(driver, tmp_path):
    config, programs = prepare(tmp_path), driver([gpu()])
    hook = tmp_path / "sitecustomize.py"  # this machine's torch may be built without CUDA
    hook.write_text("import torch\ntorch.version.cuda = '13.0'\n")
    path = {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": f"{tmp_path}:{os.getcwd()}"}
    done = subprocess.run(
        [sys.executable, "-m", "launch.train", "--config", str(config)],
        env={name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"} | path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and "needs NVIDIA driver 580.65.06 or newer" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and "loading the model" not in done.stdout


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(ValueError, match="8 ranks were started on this machine, and torch sees 4 of its GPUs"):
        check_seen()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    check_seen()


USERS = ["GPU-aaaa1, 4242, python -m vllm, with a comma, 75776", "GPU-aaaa2, 7, other, 99"]


def test_a_role_is_not_given_a_gpu_that_is_in_use(driver):
    driver([gpu(0), gpu(1, free=4096), gpu(2)], USERS)
    check_free("USER_GPUS", "0,2", 0.9)
    with pytest.raises(ValueError) as told:
        check_free("USER_GPUS", "0,1", 0.9)
    assert "GPU 1 (NVIDIA H100 80GB HBM3): 4.0 of 80.0 GiB are free, and 72.0 are needed" in str(told.value)
    assert "in use by pid 4242 (python -m vllm, with a comma, 74.0 GiB); choose a GPU that nobody" in str(told.value)
    assert "USER_GPUS" in str(told.value) and "pid 7" not in str(told.value)
    check_free("USER_GPUS", "GPU-aaaa0", 0.9)
    with pytest.raises(ValueError, match="USER_GPUS=7 names a GPU that this machine does not have"):
        check_free("USER_GPUS", "7", 0.9)


def serve_roles(programs: Path, **environment: str) -> str:
    """What it says last, of a script that fails before it starts a server."""
    done = subprocess.run(
        ["bash", "launch/serve_roles.sh"],
        env=os.environ | {"PYTHON": sys.executable, "PATH": f"{programs}:{os.environ['PATH']}"} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and "starting" not in done.stdout, done.stdout + done.stderr
    return done.stderr


def test_the_role_servers_refuse_gpus_of_training_or_of_each_other(driver, tmp_path):
    pytest.importorskip("vllm")
    programs, logs = driver([gpu(0), gpu(1, free=4096), gpu(2)], USERS), str(tmp_path)
    told = serve_roles(programs, LOG_DIR=logs)
    assert "serve_roles: GPU 1" in told and "pid 4242" in told and "JUDGE_GPUS" in told
    told = serve_roles(programs, LOG_DIR=logs, JUDGE_GPUS="0")
    assert "GPU 0 is in USER_GPUS and JUDGE_GPUS" in told
    shares = {"USER_ARGS": "--gpu-memory-utilization 0.9", "JUDGE_ARGS": "--gpu-memory-utilization=0.4"}
    told = serve_roles(programs, LOG_DIR=logs, USER_GPUS="2", JUDGE_GPUS="2,1", **shares)
    assert "GPU 1" in told and "32.0 are needed" in told


@pytest.fixture
def own_gpu(driver, monkeypatch):
    """A rank on GPU 1, as torch would tell, of which `free` MiB are free."""

    def make(free):
        driver([gpu(0), gpu(1, free=free)], USERS)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        properties = SimpleNamespace(uuid="aaaa1", total_memory=80 * 2**30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: {1: properties}[index])
        monkeypatch.setenv("LOCAL_RANK", "1")

    return make


def test_training_is_told_who_uses_the_gpu_it_was_given(own_gpu, tmp_path):
    config = load_config(prepare(tmp_path, engine__kind="vllm", engine__gpu_memory_utilization=0.5))
    pytest.importorskip("vllm")
    own_gpu(40 * 1024 + 100)  # the engine's half, and a model of a few MiB
    check_inputs(config)
    own_gpu(40 * 1024)
    with pytest.raises(GPUFault) as told:
        check_own_gpu(config, trains=True)
    share = "engine.gpu_memory_utilization 0.5: 40.0"
    for part in ("GPU 1", share, "model and optimizer: 0.0", "pid 4242", "USER_GPUS"):
        assert part in str(told.value)
    check_own_gpu(config, trains=False)  # conversations alone need the engine's half


def test_the_least_memory_of_a_rank_by_hand(tmp_path):
    def state(num_ranks, **changes):
        return state_bytes(load_config(prepare(tmp_path, **changes)), 1000, num_ranks)

    sharded = {"deepspeed__stage": 3, "model__dtype": "bfloat16"}
    assert state(4, **sharded) == (2 + 4 + 8) * 1000 / 4
    assert state(4, **sharded, loss__kl_coef=0.1) == (2 + 2 + 4 + 8) * 1000 / 4  # the reference's weights too
    assert state(4, deepspeed__stage=2, model__dtype="bfloat16") == 2 * 1000 + (4 + 8) * 1000 / 4
    assert state(4, deepspeed__stage=0, model__dtype="float32") == (4 + 8) * 1000
    offload = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    assert state(4, **sharded, deepspeed__extra=offload) == 2 * 1000 / 4
