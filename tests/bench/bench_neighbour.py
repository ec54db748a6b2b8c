"""Seconds of a quickstart step alone and beside one busy process. Linux, CPU.

    python -m tests.bench.bench_neighbour [--steps N] [--nice N]

It takes about eight minutes on two cores; nothing else should run beside it. Every run is `launch.train` with the
quickstart's configuration and data and without evaluations, in a process of its own, in which a first step warms up and
N steps count [3]. The neighbour is one Python process in an endless loop, from the end of the first step on. Four runs:

ours alone, ours beside      what a user gets: fewer threads compute while others want the cores.
fixed alone, fixed beside    as many threads as cores, whatever others want: OMP_NUM_THREADS says so.

All runs have the same seeds, so that their steps sample and train the same (but for the rounding of float32).

seconds     of a step; median over the steps that count.
others      cores that other processes kept busy during these steps, the neighbour included: alone it should be under
            0.1, or the machine was not idle.
beside      seconds beside / seconds alone, ours (goal: at most 1.8; fair shares of two cores would give 1.5).
fixed       the same of a fixed number of threads.
alone       our seconds alone / those of a fixed number of threads (goal: at most 1.1).

With `--nice`, the runs have that priority, the neighbour the usual one; at 10 it gets nine tenths of a core, and fair
shares would give 1.8. The goals are those of equal priority. The last line is one JSON object with every figure.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from grpo.run.recorder import read_rows
from launch.prepare_data import prepare
from launch.quickstart import ARTICLES, CONFIG, HELD_OUT
from rollout.cores import Usage
from tests.bench.figures import Figures

ROOT = Path(__file__).resolve().parents[2]
BESIDE_GOAL, ALONE_GOAL = 1.8, 1.1
FIXED = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
LOOK_EVERY_S = 0.1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.bench_neighbour", description="A training step alone and beside a busy process."
    )
    parser.add_argument("--steps", type=int, default=3, help="that count, of each run [3]")
    parser.add_argument("--nice", type=int, default=0, help="priority of the runs, not of the neighbour [0]")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    return options


def train(folder: Path, data: Path, options: argparse.Namespace, environment: dict[str, str], beside: bool) -> Figures:
    """A run, beside the neighbour from its second step on."""
    overrides = {
        "run.name": "bench",
        "run.folder": folder,
        "run.steps": 1 + options.steps,
        "data.train": data / "rl_train.parquet",
        "data.validation": "null",
    }
    command = ["nice", "-n", str(options.nice), sys.executable, "-m", "launch.train", "--config", str(ROOT / CONFIG)]
    command += [f"{name}={value}" for name, value in overrides.items()]
    metrics, log = folder / "bench" / "metrics.jsonl", folder / "log"
    metrics.unlink(missing_ok=True)
    with ExitStack() as until_end, log.open("w") as output:
        run = subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, stdout=output, stderr=output)
        until_end.callback(run.kill)
        wait_for_steps(1, metrics, run, log)
        if beside:
            neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            until_end.callback(neighbour.kill)
        before = usage(run.pid)
        wait_for_steps(1 + options.steps, metrics, run, log)
        others = usage(run.pid).others_since(before)
    run.wait()
    seconds = [row["time/step"] for row in read_rows(metrics)[1:]]
    return {"seconds": statistics.median(seconds), "others": others, "all_seconds": seconds}


def wait_for_steps(number: int, metrics: Path, run: subprocess.Popen[bytes], log: Path) -> None:
    """Exits where the run ends before, with its last words."""
    while not metrics.exists() or len(read_rows(metrics)) < number:
        if run.poll() is not None:
            sys.exit(f"the run failed:\n{log.read_text()[-4000:]}")
        time.sleep(LOOK_EVERY_S)


def usage(pid: int) -> Usage:
    """Of all cores, by all processes and by `pid`."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    cores = os.sched_getaffinity(0)
    now = Usage.now(cores)
    return Usage(now.at, now.all_s, (int(user) + int(system)) / os.sysconf("SC_CLK_TCK"))


def verdict(ratio: float, goal: float) -> str:
    return f"{ratio:.2f} (goal {goal:g}: {'reached' if ratio <= goal else 'MISSED'})"


def main() -> None:
    options = parse()
    if chosen := {"OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        print(f"{', '.join(sorted(chosen))} must not be set: threads are what this is about", file=sys.stderr)
        sys.exit(2)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the run and the neighbour end too
    result: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        prepare(ROOT / ARTICLES, HELD_OUT, data)
        for name, environment in [("ours", {}), ("fixed", FIXED)]:
            for place in ("alone", "beside"):
                figures = result[f"{name} {place}"] = train(Path(folder), data, options, environment, place == "beside")
                print(f"{name:<5} {place:<6} {figures['seconds']:6.2f} s a step", end=", ")
                print(f"{figures['others']:.2f} cores busy with others", flush=True)
    ours, fixed = result["ours alone"]["seconds"], result["fixed alone"]["seconds"]
    result["beside"] = result["ours beside"]["seconds"] / ours
    result["fixed"] = result["fixed beside"]["seconds"] / fixed
    result["alone"] = ours / fixed
    print(f"beside a busy process: {verdict(result['beside'], BESIDE_GOAL)}", end="; ")
    print(f"with a fixed number of threads: {result['fixed']:.2f}")
    print(f"alone, of the seconds with a fixed number of threads: {verdict(result['alone'], ALONE_GOAL)}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
