"""Seconds and memory of an update, against TRL's GRPOTrainer on the same batch. Linux, CPU.

    pip install -e '.[bench]'
    python -m tests.bench.bench_update [--pairs N] [--shapes short,long_replies] [--no-step]

It takes about 75 minutes on two cores; nothing else should run beside it. Every measurement has a process of its own,
ours and TRL's by turns; in each the first update warms up and the second counts; the first pair of a shape makes a
third one for its memory. Both train the same model in
float32 on the same made-up token ids with the same rewards, KL penalty, learning rate and threads, without gradient
checkpointing, with at most 4,096 tokens (padding included) in one forward pass. The gradient norms of the updates
must agree within 1 %, so both did the same work; otherwise the bench fails.

    short         2 prompts of 114 tokens, 8 replies of 48 tokens each
    long_prompt   1 prompt of 1,500 tokens, 8 replies of 64
    long_replies  1 prompt of 114 tokens, 8 replies of 256

What the figures mean (medians over the pairs):

seconds            of the update: reference forward, policy forward, backward, gradient clip, optimizer step. Ours is
                   `Updater.update`; TRL's runs from the replies handed to it to the end of its `optimizer.step()`.
peak               largest resident memory of the process during the update, GiB.
above state        peak less the resident memory just before the update, which then holds the libraries, the policy,
                   the reference and AdamW's averages (freed memory is returned to the system first, which slows this
                   update down, so that its seconds are not taken). What is left is the update's own: activations,
                   gradients, logits. The same definition for both.
ratio              TRL's seconds / ours. Memory: ours / TRL's.
step               a whole training step at `short`: generate (at most 48 tokens a reply), score by length, update,
                   sync. Ours is `launch.train` with vLLM; TRL generates with transformers. Update and sampling
                   settings as above.
growth             ours, one prompt with 2, 4, 8, 16 replies, and 1, 2, 4 prompts with 8 each (prompts of 114 tokens,
                   replies of 48): seconds = constant + slope x tokens by least squares, with r2, where each prompt
                   and each reply counts once.
floor              seconds that the needed matrix products take at the rate of `torch.mm` on 2,048 x 2,048 float32
                   matrices, measured in the same process after the update: 2 operations per weight of the body and
                   token (each prompt once), and per weight of the head and response token, in a forward pass; twice
                   that in the backward pass. Attention scores, norms, softmax, recomputation and the optimizer are
                   not in it. `share` is floor / seconds of each phase; `other` is planning, packing, loss and metrics.

The last line is one JSON object with every figure. TRL on a CPU sends prompt positions through the head too, as it
comes; nothing of it is changed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from grpo.ranks import end_process
from tests.bench.figures import Figures, medians

ROOT = Path(__file__).resolve().parents[2]
SHAPES = {"short": (2, 114, 8, 48), "long_prompt": (1, 1500, 8, 64), "long_replies": (1, 114, 8, 256)}
"""(prompts, prompt tokens, replies per prompt, reply tokens)"""
GROWTH = {
    "group": [(1, 114, group_size, 48) for group_size in (2, 4, 8, 16)],
    "batch": [(prompts, 114, 8, 48) for prompts in (1, 2, 4)],
}
PAIRS = {"short": 5, "long_prompt": 3, "long_replies": 3}
UPDATE_GOALS = {"short": 4.0, "long_prompt": 8.0, "long_replies": 1.5}
STEP_GOAL, MEMORY_GOAL = 3.0, 0.5


# ── in a process of its own: one measurement ──


def measure(system: str, task: str, shape_name: str, memory: bool, model: Path, threads: int) -> Figures:
    import torch

    from tests.bench.common import Shape

    torch.set_num_threads(threads)
    module = importlib.import_module(f"tests.bench.{system}_system")
    if task == "growth":
        figures = module.growth(model, {name: [Shape(*sizes) for sizes in cases] for name, cases in GROWTH.items()})
    elif task == "update":
        figures = module.update(model, Shape(*SHAPES[shape_name]), memory=memory)
    else:
        figures = module.step(model, Shape(*SHAPES[shape_name]))
    return figures | {"threads": torch.get_num_threads()}


def run_worker(system: str, task: str, shape: str, options: argparse.Namespace, *, memory: bool = False) -> Figures:
    """`measure` in a new process. Exits where that fails, with its last words."""
    command = [sys.executable, "-m", "tests.bench.bench_update", "--system", system, "--task", task, "--shape", shape]
    command += ["--memory"] * memory + ["--model", str(options.model.resolve()), "--threads", str(options.threads)]
    offline = {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment = os.environ | offline | {"OMP_NUM_THREADS": str(options.threads)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{system} {task} {shape} failed:\n{done.stderr[-4000:]}")
    figures = json.loads(done.stdout.splitlines()[-1])
    if figures["threads"] != options.threads:
        sys.exit(f"{system} {task} {shape} ran with {figures['threads']} threads, not {options.threads}")
    print(f"  {system:<4} {task:<6} {shape:<12}" + _seconds(figures), flush=True)
    return figures


def _seconds(figures: Figures) -> str:
    return f" {figures['seconds']:8.2f} s" if "seconds" in figures else ""


# ── in the first process: pairs of measurements, and what they say ──


def pairs_of(task: str, shape: str, number: int, options: argparse.Namespace) -> dict[str, list[Figures]]:
    """Figures of both systems, measured by turns."""
    runs: dict[str, list[Figures]] = {"ours": [], "trl": []}
    for pair in range(number):
        runs["ours"].append(run_worker("our", task, shape, options, memory=pair == 0))
        runs["trl"].append(run_worker("trl", task, shape, options, memory=pair == 0))
    return runs


def check_same_work(shape: str, ours: Figures, trl: Figures) -> None:
    for mine, theirs in zip(ours["grad_norms"], trl["grad_norms"], strict=True):
        if not (0 < mine < math.inf and 0 < theirs < math.inf and math.isclose(mine, theirs, rel_tol=0.01)):
            sys.exit(f"{shape}: the gradient norms are {mine:g} (ours) and {theirs:g} (TRL): not the same work")
    if not all(map(math.isfinite, [*ours["losses"], *trl["losses"]])):
        sys.exit(f"{shape}: a loss is not finite: {ours['losses']} (ours), {trl['losses']} (TRL)")


def compare_updates(shape: str, number: int, options: argparse.Namespace) -> Figures:
    runs = pairs_of("update", shape, number, options)
    ours, trl = medians(runs["ours"]), medians(runs["trl"])
    check_same_work(shape, ours, trl)
    return {
        "ours": ours,
        "trl": trl,
        "ratio": trl["seconds"] / ours["seconds"],
        "goal": UPDATE_GOALS[shape],
        "memory_ratio_peak": ours["peak_gib"] / trl["peak_gib"],
        "memory_ratio_above_state": ours["peak_above_state_gib"] / trl["peak_above_state_gib"],
        "memory_goal": MEMORY_GOAL,
        "all_seconds": {system: [run["seconds"] for run in done] for system, done in runs.items()},
    }


def compare_steps(number: int, options: argparse.Namespace) -> Figures:
    runs = pairs_of("step", "short", number, options)
    ours, trl = medians(runs["ours"]), medians(runs["trl"])
    return {
        "ours": ours,
        "trl": trl,
        "ratio": trl["seconds"] / ours["seconds"],
        "goal": STEP_GOAL,
        "all_seconds": {system: [run["seconds"] for run in done] for system, done in runs.items()},
    }


def fit(points: list[Figures]) -> Figures:
    """seconds = constant + slope x tokens."""
    tokens, seconds = [point["tokens"] for point in points], [point["seconds"] for point in points]
    slope, constant = statistics.linear_regression(tokens, seconds)
    r2 = statistics.correlation(tokens, seconds) ** 2
    return {"points": points, "constant_s": constant, "slope_s_per_token": slope, "r2": r2}


def cpu_model() -> str:
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return found[1] if found else platform.machine()


def print_update(name: str, result: Figures) -> None:
    ours, trl = result["ours"], result["trl"]
    print(f"\n{name}: update {ours['seconds']:.2f} s", end=", ")
    print(f"TRL {trl['seconds']:.2f} s: {verdict(result['ratio'], result['goal'])}")
    memory = result["memory_ratio_above_state"]
    print(
        f"  above state {ours['peak_above_state_gib']:.2f} GiB, TRL {trl['peak_above_state_gib']:.2f} GiB: "
        f"{memory:.2f} of TRL's (goal {MEMORY_GOAL:g}: {'reached' if memory <= MEMORY_GOAL else 'MISSED'}); "
        f"peak {ours['peak_gib']:.2f} GiB, TRL {trl['peak_gib']:.2f} GiB"
    )
    print(f"  floor at {ours['matrix_gflops']:.0f} GFLOP/s:")
    other = ours["seconds"] - sum(ours["phases"].values())
    for phase, seconds in [*ours["phases"].items(), ("other", other), ("update", ours["seconds"])]:
        floor = sum(ours["floors"].values()) if phase == "update" else ours["floors"].get(phase, 0.0)
        print(f"    {phase:<18} {seconds:7.2f} s   floor {floor:7.2f} s   share {floor / max(seconds, 1e-9):5.0%}")


def verdict(ratio: float, goal: float) -> str:
    return f"{ratio:.1f}x (goal {goal:g}x: {'reached' if ratio >= goal else 'MISSED'})"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.bench_update", description="Our update against TRL's.")
    parser.add_argument("--pairs", type=int, help="pairs of measurements at every shape [5 at short, 3 elsewhere]")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="shapes to measure, with commas between [all]")
    parser.add_argument("--no-step", action="store_true", help="leave the whole training step out")
    parser.add_argument("--model", type=Path, default=ROOT / "models/SmolLM2-135M-Instruct", help="model folder")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of torch [all cores]")
    parser.add_argument("--system", choices=["our", "trl"], help="measure one system in this process")
    parser.add_argument("--task", choices=["update", "step", "growth"], default="update", help="with --system")
    parser.add_argument("--memory", action="store_true", help="with --system: a third update, for its memory")
    parser.add_argument("--shape", choices=list(SHAPES), default="short", help="with --system")
    options = parser.parse_args()
    options.shapes = options.shapes.split(",")
    if unknown := set(options.shapes) - set(SHAPES):
        parser.error(f"unknown shapes {', '.join(sorted(unknown))}; known: {', '.join(SHAPES)}")
    if options.pairs is not None and options.pairs < 1:
        parser.error("--pairs must be at least 1")
    return options


def main() -> None:
    options = parse()
    if importlib.util.find_spec("trl") is None:
        print("TRL is not installed: pip install -e '.[bench]'", file=sys.stderr)
        sys.exit(2)
    if not options.model.is_dir():
        print(f"there is no model folder {options.model}: bash launch/quickstart.sh makes it", file=sys.stderr)
        sys.exit(2)
    if options.system:
        print(
            "\n"
            + json.dumps(
                measure(options.system, options.task, options.shape, options.memory, options.model, options.threads)
            )
        )
        end_process()

    result: Figures = {
        "versions": {name: version(name) for name in ("torch", "trl", "transformers")},
        "cpu": cpu_model(),
        "threads": options.threads,
    }
    print(" ".join(f"{name} {number}" for name, number in result["versions"].items()), end="; ")
    print(f"{result['cpu']}, {options.threads} threads", flush=True)
    result["update"] = {name: compare_updates(name, options.pairs or PAIRS[name], options) for name in options.shapes}
    if not options.no_step:
        result["step"] = compare_steps(options.pairs or PAIRS["short"], options)
    growth = run_worker("our", "growth", "short", options)
    result["growth"] = {name: fit(growth[name]) for name in GROWTH}

    for name, update in result["update"].items():
        print_update(name, update)
    if not options.no_step:
        step = result["step"]
        print(f"\nstep: {step['ours']['seconds']:.2f} s", end=", ")
        print(f"TRL {step['trl']['seconds']:.2f} s: {verdict(step['ratio'], step['goal'])}")
        print(f"  replies of {step['ours']['reply_tokens_mean']:.1f} tokens", end="")
        print(f", TRL {step['trl']['reply_tokens_mean']:.1f}")
    print("\ngrowth of our seconds with tokens:")
    for name, line in result["growth"].items():
        points = ", ".join(f"{point['tokens']}: {point['seconds']:.2f} s" for point in line["points"])
        print(f"  {name}: {points}")
        print(f"    = {line['constant_s']:.2f} s + {line['slope_s_per_token'] * 1000:.2f} ms x tokens", end="")
        print(f", r2 {line['r2']:.4f}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
