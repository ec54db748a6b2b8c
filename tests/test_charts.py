"""What a run leaves for charts: a real run of a tiny model, its figures checked against its traces. Beside it, that no
compiler runs: programs in their names, first in PATH, would leave a mark.
"""

from __future__ import annotations

import os
import subprocess
import sys
from statistics import fmean

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grpo.run.recorder import read_rows
from launch.report import summarize
from tests.small_run import SmallRun, prepare
from tests.tiny import SPECIAL, WORDS
from tests.torchrun import QUIET

COMPILERS = ("cc", "gcc", "g++", "c++", "clang", "clang++", "nvcc", "hipcc", "ninja")


def marking_compilers(folder):
    """A PATH that begins with them; each call leaves a line in `compiled`."""
    (folder / "bin").mkdir()
    for name in COMPILERS:
        script = folder / "bin" / name
        script.write_text(f'#!/bin/sh\necho "{name} $*" >>{folder}/compiled\nexit 1\n')
        script.chmod(0o755)
    return f"{folder}/bin:{os.environ['PATH']}"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("charts")
    validation = {"data__validation": str(folder / "held_out.jsonl")}
    config = prepare(folder, deepspeed__stage=1, update__mini_batch_prompts=1, loss__kl_coef=0.01, **validation)
    with SmallRun(config, PATH=marking_compilers(folder)) as run:
        assert run.wait() == 0, run.output
    return run


def test_nothing_is_compiled_on_a_cpu(run):
    assert not (run.folder.parent / "compiled").exists(), (run.folder.parent / "compiled").read_text()


def test_evaluations_have_lines_of_their_own_between_the_steps(run):
    lines = read_rows(run.folder / "metrics.jsonl")
    assert [(line["step"], "evaluation/reward" in line) for line in lines] == [
        (0, True), (1, False), (2, False), (2, True)
    ]  # fmt: skip
    assert summarize(run.folder)["steps"] == 2
    for line in (lines[0], lines[-1]):
        rows = read_rows(run.folder / "evaluations" / f"step_{line['step']:05}.jsonl")
        amounts = [row["reward"]["means"]["token_amount"] for row in rows]
        assert line["evaluation/token_amount"] == pytest.approx(fmean(amounts))
        for name in ("reward", "token_amount"):
            low, mean, high = (line[f"evaluation/{name}{end}"] for end in ("_low", "", "_high"))
            assert low < mean < high and mean - low == pytest.approx(high - mean)


def test_tensorboard_shows_what_metrics_jsonl_holds(run):
    board = EventAccumulator(str(run.folder / "tensorboard"))
    board.Reload()
    shown = {(event.step, name): event.value for name in board.Tags()["scalars"] for event in board.Scalars(name)}
    lines = read_rows(run.folder / "metrics.jsonl")
    kept = {(line["step"], name): value for line in lines for name, value in line.items() if name != "step"}
    assert shown.keys() == kept.keys() and len(kept) > 100
    for key, value in kept.items():
        assert shown[key] == pytest.approx(value, rel=1e-6), key


def test_each_phase_has_its_memory_and_the_peak_is_that_of_one(run):
    for step in run.metrics:
        phases = [step[f"memory/{name}_gib"] for name in ("rollout", "update", "sync")]
        assert all(0.1 < size < 16 for size in phases) and step["memory/peak_gib"] == max(phases)


def test_the_operations_of_an_update_are_those_of_the_replies_it_trains_on(run):
    """Two mini-batches of a prompt, with a reference: three forwards' worth each, one more for it, and the second one's
    old log-probs.
    """
    layers = 2 * (128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 128)
    for step in run.metrics:
        rows = read_rows(run.folder / "traces" / f"step_{step['step']:05}.jsonl")
        needed = []
        for item in dict.fromkeys(row["scenario_id"] for row in rows):
            replies = [row["reply_tokens"][0] for row in rows if row["scenario_id"] == item]
            (prompt,) = {row["prompt_tokens"] for row in rows if row["scenario_id"] == item}
            pairs = prompt * (prompt + 1) // 2 + sum(n * prompt + n * (n + 1) // 2 for n in replies)
            head = len(SPECIAL + WORDS) * 128
            needed.append(2 * layers * (prompt + sum(replies)) + 2 * head * sum(replies) + 2 * 4 * 128 * pairs)
        counted = step["perf/update_tflops"] * 1e12 * step["time/update"]
        assert counted == pytest.approx(4 * needed[0] + 5 * needed[1]) or counted == pytest.approx(
            5 * needed[0] + 4 * needed[1]
        )
        assert "perf/mfu" not in step  # a CPU's peak is not known


def test_the_first_mini_batch_has_a_ratio_of_one_and_the_second_another(run):
    for step in run.metrics:
        assert 0.5 < step["update/ratio_mean"] < 2 and step["update/ratio_max"] > 1.0001


def test_on_a_gpu_nothing_of_deepspeeds_is_turned_off():
    program = (
        "import os, torch\n"
        "torch.cuda.is_available = lambda: True\n"
        "import grpo.model.policy, deepspeed\n"
        "assert '__compatible_ops__' not in vars(deepspeed.ops), 'set, or looked for: compilers are tried for it'\n"
        "assert 'DS_ACCELERATOR' not in os.environ\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"} | QUIET
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
