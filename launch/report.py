"""Shows what a run did, from the files it left: rewards, the held-out comparison, a conversation before and after; and
of a run that ended early why, what is left of it, and how to go on.

    python -m launch.report runs/quickstart

Also writes `summary.json` into the run's folder, for those who script it.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from grpo.evidence.evaluate import item_components, item_rewards
from grpo.evidence.statistics import PairedDifference, paired_difference
from grpo.run.folder import FINISHED, RunFolder
from grpo.run.recorder import read_rows, read_steps
from launch.terminal import printable
from rollout.settings import user_path


def summarize(run: Path) -> dict[str, Any]:
    """The run in figures. Raises ValueError where `run` holds no run, or one without a step."""
    folder = RunFolder(run)
    status, ended = folder.status or {}, how_it_ended(folder)
    steps = read_steps(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []
    if not steps or not all((run / name).exists() for name in ("environment.json", "config.yaml")):
        why = f" ({ended})" if ended else ""
        raise ValueError(
            f"{run} holds no run, or one without a single step{why}; give a folder such as runs/quickstart"
        )
    try:
        rewards = [step["reward/mean"] for step in steps if step["reward/mean"] is not None]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{run}/metrics.jsonl was not written by this project: it has no {error}") from error
    held_out = compare_evaluations(run)
    totals = json.loads((run / "totals.json").read_text()) if (run / "totals.json").exists() else {}
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    return {
        "run": str(run),
        "engine": json.loads((run / "environment.json").read_text())["engine"],
        "steps": len(steps),
        "total_steps": status.get("total_steps"),
        "ended": ended,
        "warnings": status.get("warnings", []),
        "weights": [str(weights.path) for weights in folder.weights()],
        "to_go_on": None if folder.holder else folder.command_to_go_on(),
        "minutes_training": sum(step["time/step"] for step in steps) / 60,
        "reward_first_2": fmean(rewards[:2]) if rewards else float("nan"),
        "reward_last_5": fmean(rewards[-5:]) if rewards else float("nan"),
        "totals": totals,
        "held_out_temperature": config["evaluation"]["temperature"],
        "held_out": {name: asdict(row) for name, row in held_out.items()},
        "held_out_t": held_out["reward"].t if held_out else None,
    }


def how_it_ended(folder: RunFolder) -> str | None:
    """None of a run that is older than its status."""
    if folder.holder:
        return f"still going on: {folder.holder}"
    if folder.status and folder.status["ended"] is None:
        return "ended without a word: killed by the system or a person (kill -9, memory, power)"
    return folder.status and folder.status["ended"]


def compare_evaluations(run: Path) -> dict[str, PairedDifference]:
    """Paired comparison of the first and the last evaluation, of the reward and each of its components."""
    files = sorted((run / "evaluations").glob("*.jsonl"))
    if len(files) < 2:
        return {}
    before, after = read_rows(files[0]), read_rows(files[-1])
    names = list(dict.fromkeys(name for row in [*before, *after] for name in row["reward"]["means"]))
    columns = {"reward": (item_rewards(before), item_rewards(after))}
    columns |= {name: (item_components(before, name), item_components(after, name)) for name in names}
    table = {}
    for name, (old, new) in columns.items():
        shared = sorted(old.keys() & new.keys())  # items judged under both conditions
        if len(shared) >= 2:
            table[name] = paired_difference([old[item] for item in shared], [new[item] for item in shared])
    return table


def print_report(run: Path, summary: dict[str, Any]) -> None:
    minutes, first, last = (summary[key] for key in ("minutes_training", "reward_first_2", "reward_last_5"))
    n, total = summary["steps"], summary["total_steps"]
    steps = f"{n} of {total} steps" if total and total != n else f"{n} step{'s' * (n != 1)}"
    print(f"\n{steps} with the {summary['engine']} engine, {minutes:.1f} minutes of training")
    if summary["ended"] not in (None, FINISHED):
        print(f"the run: {summary['ended']}")
    for warning in summary["warnings"]:
        print(f"warning: {warning}")
    if n > 5:
        print(f"training reward: {first:.3f} (first 2 steps) -> {last:.3f} (last 5 steps)")
    else:
        print(f"training reward: {last:.3f} (all there is: {steps})")
    totals = summary["totals"]
    for role in ("user", "judge"):
        if calls := totals.get(f"{role}/calls"):
            failed = sum(number for name, number in totals.items() if name.startswith(f"{role}/failures/"))
            read, written = totals[f"{role}/prompt_tokens"], totals[f"{role}/completion_tokens"]
            print(f"{role}: {calls:.0f} questions, {failed:.0f} failed; {read:.0f} tokens read, {written:.0f} written")
    if summary["held_out"]:
        n = next(iter(summary["held_out"].values()))["n"]
        temperature = summary["held_out_temperature"]
        sampled = f"temperature {temperature:g}" if temperature else "most likely tokens"
        print(f"\nheld-out conversations ({n} items, {sampled})")
        print(f"  {'':<16}{'before':>9}{'after':>9}{'difference':>12}{'std. error':>12}{'paired t':>10}")
        for name, row in summary["held_out"].items():
            t = f"{row['t']:>10.2f}" if row["t"] is not None and math.isfinite(row["t"]) else f"{'-':>10}"
            means = f"{row['before']:>9.3f}{row['after']:>9.3f}{row['difference']:>+12.3f}"
            print(f"  {name:<16}{means}{row['standard_error']:>12.3f}{t}")
        print_side_by_side(run)
    else:
        print("\nheld-out conversations: fewer than two evaluations share items that could be judged, so no comparison")
    print("\nwhere things are")
    weights = [Path(path) for path in summary["weights"]]
    of_model = "trained model" if (run / "model") in weights else "newest checkpoint: no trained model was saved"
    for what, path in (
        *((f"{of_model} (Hugging Face folder)", path) for path in weights[-1:]),
        ("metrics, a line per step and evaluation", run / "metrics.jsonl"),
        (f"TensorBoard (tensorboard --logdir {run})", run / "tensorboard"),
        ("conversations with scores and advantages", run / "traces"),
        ("held-out conversations", run / "evaluations"),
        ("this summary", run / "summary.json"),
    ):
        print(f"  {what:<52} {path}")
    if not weights:
        print("  no trained model and no checkpoint was saved (run.save_every)")
    if summary["to_go_on"]:
        print(f"\nto go on from the newest weights (the optimizer begins anew)\n  {summary['to_go_on']}")
        if "***@" in (run / "config.yaml").read_text(encoding="utf-8"):
            print("  with the passwords of its addresses, which config.yaml does not keep")


def print_side_by_side(run: Path) -> None:
    """The held-out conversation whose reward changed by the median amount: neither the best nor the worst."""
    files = sorted((run / "evaluations").glob("*.jsonl"))
    before, after = ({row["scenario_id"]: row for row in read_rows(file)} for file in (files[0], files[-1]))
    old, new = item_rewards(list(before.values())), item_rewards(list(after.values()))
    changes = sorted((new[item] - old[item], item) for item in old.keys() & new.keys())
    item = changes[len(changes) // 2][1]
    width = max(38, min(60, (shutil.get_terminal_size().columns - 3) // 2))
    columns = [_conversation_lines(rows[item], rewards[item], width) for rows, rewards in ((before, old), (after, new))]
    print(f"\none held-out conversation ({item}, the median change)")
    print(f"{'before training':<{width}} | after training")
    print(f"{'-' * width}-+-{'-' * width}")
    height = max(map(len, columns))
    for left, right in zip(*(column + [""] * (height - len(column)) for column in columns), strict=True):
        print(f"{left:<{width}} | {right}".rstrip())


def _conversation_lines(row: dict[str, Any], reward: float, width: int) -> list[str]:
    lines = []
    for message in row["messages"]:
        if message["role"] != "system":
            said = printable(" ".join(message["content"].split())) or "(nothing)"
            lines += [*textwrap.wrap(f"{message['role'].upper()}: {said}", width), ""]
    return [*lines, f"[{row['ended']}, reward {reward:.3f}]"]


def report(run: Path, extra: dict[str, Any] | None = None) -> dict[str, Any]:
    """Prints the report and writes `summary.json`, with `extra` added."""
    file = run / "summary.json"
    earlier = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    summary = earlier | summarize(run) | (extra or {})
    file.write_text(json.dumps(_json_safe(summary), indent=2) + "\n", encoding="utf-8")
    print_report(run, summary)
    return summary


def _json_safe(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _json_safe(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m launch.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=user_path, help="folder of a run")
    try:
        report(parser.parse_args(arguments).run)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
