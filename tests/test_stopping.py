"""How a run ends before its last step: whole, on all ranks, with a word on why."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from grpo.config import BudgetSettings
from grpo.config_file import load_config
from grpo.run.folder import RunFolder
from grpo.run.peers import Peers
from grpo.run.recorder import read_rows
from grpo.run.stopping import StopSignals, used_up
from launch.train import check_inputs
from tests.fake_endpoint import FakeEndpoint, error, is_check, says
from tests.small_disk import fill, small_disk
from tests.small_run import SmallRun, prepare

ANSWER = says({"current_answer": "", "thought": "", "reply": "please say what bees want in winter"})


class Gate:
    """A simulated user that answers until step 1 is recorded, and then not before `open` is set."""

    def __init__(self, folder):
        self.metrics, self.open, self.reached = folder / "run" / "metrics.jsonl", threading.Event(), threading.Event()

    def __call__(self, body):
        if self.metrics.exists():
            self.reached.set()
            self.open.wait(400)
        return ANSWER


def weights_of(folder):
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("num_ranks", "signal_number", "code"), [(1, signal.SIGTERM, 143), (2, signal.SIGINT, 1)])
def test_the_first_signal_finishes_the_rollout_and_saves_the_model_of_the_last_whole_step(
    tmp_path, num_ranks, signal_number, code
):
    gate = Gate(tmp_path)
    with FakeEndpoint(gate) as user:
        config = prepare(tmp_path, user.base_url, run__steps=50, run__save_every=1)
        with SmallRun(config, num_ranks) as run:
            run.wait_until(gate.reached.is_set)
            run.process.send_signal(signal_number)
            run.wait_until(lambda: "finishing the phase that runs" in run.output)
            gate.open.set()
            assert run.wait() == code, run.output  # torchrun's own is 1, whatever the signal
            assert not run.processes()
    assert f"stopped by {signal_number.name}; 1 of 50 steps are done" in run.output
    assert str(run.folder / "model") in run.output
    assert [row["step"] for row in run.metrics] == [1]
    assert weights_of(run.folder / "model") == weights_of(run.folder / "checkpoints" / "step_00001")
    AutoModelForCausalLM.from_pretrained(run.folder / "model")


def test_the_second_signal_ends_the_run_within_10_s_and_costs_only_the_step_that_runs(tmp_path):
    gate = Gate(tmp_path)
    with FakeEndpoint(gate) as user:
        config = prepare(tmp_path, user.base_url, run__steps=50, run__save_every=1)
        with SmallRun(config) as run:
            run.wait_until(gate.reached.is_set)
            run.process.send_signal(signal.SIGINT)
            run.wait_until(lambda: "finishing the phase that runs" in run.output)
            started = time.monotonic()
            run.process.send_signal(signal.SIGINT)
            assert run.wait() == 130, run.output
            assert time.monotonic() - started < 10
            assert not run.processes()
        gate.open.set()
    assert "SIGINT again: stopped at once" in run.output
    assert [row["step"] for row in run.metrics] == [1]
    assert {row["step"] for row in read_rows(run.folder / "traces" / "step_00001.jsonl")} == {1}
    assert len(list((run.folder / "traces").iterdir())) == 1
    AutoModelForCausalLM.from_pretrained(run.folder / "checkpoints" / "step_00001")
    assert not (run.folder / "model").exists()


def test_a_rank_that_is_killed_is_named_and_the_others_are_taken_down_instead_of_asked_to_finish(tmp_path):
    gate = Gate(tmp_path)
    with FakeEndpoint(gate) as user:
        config = prepare(tmp_path, user.base_url, run__steps=50, run__save_every=1)
        with SmallRun(config, num_ranks=2, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="600") as run:
            run.wait_until(gate.reached.is_set)
            ranks = [pid for pid in run.processes() if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()]
            with pytest.raises(ValueError, match="a run is going on in .*run \\(process"):
                check_inputs(load_config(config, ["run.overwrite=true"]))
            os.kill(min(ranks), signal.SIGKILL)
            assert run.wait() == 1, run.output  # while the gate is shut
            assert not run.processes()
        gate.open.set()
    assert "finishing the phase" not in run.output
    assert run.output.count(f"rank 1 (process {min(ranks)}) on ") == run.output.count("ended without a word") == 1
    folder = RunFolder(run.folder)
    assert folder.holder is None and folder.status["ended"] == "a rank was killed, or crashed"
    assert folder.told() == "1 of 50 steps, 1 checkpoint (newest: step 1), no model"


@pytest.mark.parametrize(("num_ranks", "room_kib"), [(2, 300), (1, 0)])
def test_a_disk_that_is_full_ends_all_ranks_with_what_is_missing_and_what_is_kept(tmp_path, num_ranks, room_kib):
    with small_disk(tmp_path / "disk", kib=4000) as disk:
        gate = Gate(disk)
        with FakeEndpoint(gate) as user:
            config = prepare(tmp_path, user.base_url, run__folder=str(disk), run__steps=50, run__save_every=1)
            with SmallRun(config, num_ranks) as run:
                run.folder = disk / "run"
                run.wait_until(gate.reached.is_set)
                fill(disk, leave_kib=room_kib)
                gate.open.set()
                assert run.wait() == 1, run.output
                assert not run.processes()
        checkpoint = run.folder / "checkpoints" / "step_00001"
        assert run.output.count(f"{run.folder}/model could not be saved: ") == 1
        assert "No space left" in run.output and "it takes 78" in run.output and "error: rank" not in run.output
        if room_kib:  # for what the second step says, not for its model
            assert run.output.count(f"error: {run.folder}/checkpoints/step_00002 could not be saved: ") == 1
            assert "could not be saved" in RunFolder(run.folder).status["ended"]
        else:
            assert run.output.count(f"error: {run.folder} could not be written: ") == 1
            assert "Traceback" not in run.output
        assert f"2 of 50 steps are done, the newest model that is saved is of step 1: {checkpoint}" in run.output
        assert f"model.path={checkpoint} run.name=run-2 run.steps=49 run.seed=2" in run.output
        assert not [*disk.rglob("*.part")]
        AutoModelForCausalLM.from_pretrained(checkpoint)


def test_a_user_that_always_fails_ends_all_ranks_with_the_first_three_errors_and_saves_nothing(tmp_path):
    faults = itertools.cycle([error(500, "too hot"), error(501, "too busy"), says({"reply": " "})])
    with FakeEndpoint(lambda body: ANSWER if is_check(body) else next(faults)) as user:
        config = prepare(tmp_path, user.base_url, rollout__group_size=16, rollout__user__endpoint__max_attempts=1)
        with SmallRun(config, num_ranks=2) as run:
            assert run.wait() == 1, run.output
            assert not run.processes()
    for told in ("user: http_500: ", "too hot", "user: http_501: ", "too busy", "user: schema: "):
        assert told in run.output
    assert "conversations could not be judged (rewards.max_failure_rate: 0.1)" in run.output
    assert "Check that the servers of rollout.user and rewards.judge answer" in run.output
    assert {path.name for path in run.folder.rglob("*") if path.is_file() and path.parent.name != "tensorboard"} == {
        "config.yaml",
        "environment.json",
        "status.json",
        "totals.json",
    }


def test_a_user_that_fails_later_costs_no_step_that_was_done(tmp_path):
    def answer(body):
        return error(500, "gone") if (tmp_path / "run" / "metrics.jsonl").exists() else ANSWER

    with FakeEndpoint(answer) as user:
        config = prepare(
            tmp_path, user.base_url, rollout__group_size=16, rollout__user__endpoint__max_attempts=1, run__steps=9
        )
        with SmallRun(config) as run:
            assert run.wait() == 1, run.output
    assert "conversations could not be judged" in run.output and [row["step"] for row in run.metrics] == [1]
    AutoModelForCausalLM.from_pretrained(run.folder / "model")


def test_a_budget_ends_the_run_after_the_step_that_used_it_up_as_a_success(tmp_path):
    with FakeEndpoint(ANSWER) as user:
        config = prepare(tmp_path, user.base_url, run__steps=50, run__budget={"user_tokens": 60})
        with SmallRun(config) as run:
            assert run.wait() == 0, run.output
            assert not run.processes()
        num_calls = len(user.requests) - 1  # the first was the check before the run
    totals = [row["total/user/prompt_tokens"] + row["total/user/completion_tokens"] for row in run.metrics]
    assert all(total < 60 for total in totals[:-1]) and totals[-1] >= 60
    assert sum(row["user/calls"] for row in run.metrics) == run.metrics[-1]["total/user/calls"] == num_calls
    assert totals[-1] == 10 * num_calls  # each call reads 7 tokens and writes 3
    assert f"run.budget.user_tokens: 60 is used up ({totals[-1]:.0f} tokens); {len(totals)} of 50" in run.output
    assert (run.folder / "model" / "model.safetensors").exists()


def test_what_was_sampled_ahead_is_trained_on_before_a_budget_ends_the_run(tmp_path):
    with FakeEndpoint(ANSWER) as user:
        overlapped = {"rollout__overlap": "one_step", "loss__correction": "token"}
        config = prepare(tmp_path, user.base_url, run__steps=50, run__budget={"user_tokens": 60}, **overlapped)
        with SmallRun(config) as run:
            assert run.wait() == 0, run.output
    totals = [row["total/user/prompt_tokens"] + row["total/user/completion_tokens"] for row in run.metrics]
    assert all(total < 60 for total in totals[:-2]) and totals[-2] == totals[-1] == 10 * (len(user.requests) - 1)
    assert f"is used up ({totals[-1]:.0f} tokens); {len(totals)} of 50" in run.output


def test_each_part_of_a_budget_is_used_up_on_its_own():
    totals = {"total/user/prompt_tokens": 70.0, "total/user/completion_tokens": 30.0}
    totals |= {"total/judge/prompt_tokens": 5.0, "total/judge/completion_tokens": 5.0}
    assert used_up(BudgetSettings(), totals, hours=1e9) is None
    assert used_up(BudgetSettings(user_tokens=101, judge_tokens=11, hours=4), totals, hours=3.9) is None
    assert "run.budget.user_tokens: 100 is used up" in used_up(BudgetSettings(user_tokens=100), totals, hours=0)
    assert "run.budget.judge_tokens: 9 is used up (10 tokens)" in used_up(BudgetSettings(judge_tokens=9), totals, 0)
    assert "run.budget.hours: 4 is used up" in used_up(BudgetSettings(hours=4), totals, hours=4.0)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.budget.hours=0", "run.budget.hours: 0 will not do"),
        ("run.budget.user_tokens=-1", "run.budget.user_tokens: -1 will not do"),
        ("run.budget.judge_tokens=1.5", "run.budget.judge_tokens: 1.5 will not do"),
        ("run.budget.minutes=3", "run.budget.minutes: there is no such key"),
        ("run.budget.user_tokens=1000", "run.budget.user_tokens: a scripted user needs no tokens"),
        ("run.budget.judge_tokens=1000", "run.budget.judge_tokens: no reward asks a judge"),
    ],
)
def test_a_budget_that_means_nothing_is_refused(override, message):
    with pytest.raises(ValueError) as refusal:
        load_config(Path("configs/quickstart.yaml"), [override])
    assert message in str(refusal.value)


def test_a_signal_that_torchrun_passes_on_counts_once(capfd):
    peers = Peers(0, {0: os.getpid()}, bytearray(1))
    folder = RunFolder(Path("runs/x"))
    with StopSignals(peers, folder, is_main=True, echoes=True) as signals, signals.granted():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
        assert signals.received == signal.SIGINT
    assert capfd.readouterr().err.count("finishing the phase that runs") == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
