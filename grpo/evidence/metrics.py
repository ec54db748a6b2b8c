"""What a step's conversations were like: pure functions of its trace rows, over all ranks; and what they cost."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, pstdev
from typing import Any, get_args

from rewards.scoring import USER
from rollout.roles.client import LLMClient
from rollout.types import Ending

COUNTED = ("calls", "retries", "prompt_tokens", "completion_tokens", "seconds")


def conversation_metrics(rows: Sequence[Mapping[str, Any]], components: Iterable[str]) -> dict[str, float]:
    """Metrics of trace rows (`grpo.evidence.traces.trace_rows`), one per conversation.

    Rewards, lengths and truncation are those of replies, each counted once however many conversations
    continue it; prompts count once a group. Failure rates are of all conversations: `judge/` of those that could not
    be judged, `user/` of those whose user gave no usable answer, `conversation/` of both, which
    `rewards.max_failure_rate` limits.
    """
    replies = [row for row in rows if row["continuation"] == 0]
    rewards = [row["reward"] for row in replies if row["reward"]["total"] is not None]
    totals = [reward["total"] for reward in rewards]
    prompts = {row["scenario_id"]: row["prompt_tokens"] for row in rows if row["reply_tokens"]}
    metrics = {
        "reward/mean": fmean(totals) if totals else float("nan"),
        "reward/clamped": _mean(r["clamped"][name] != r["weighted"][name] for r in rewards for name in r["clamped"]),
        **_lengths("prompt", prompts.values()),
        **_lengths("reply", [row["reply_tokens"][0] for row in replies if row["reply_tokens"]]),
        "reply/truncated": fmean(row["first_reply_cut"] for row in replies),
        **_lengths("later_reply", [tokens for row in rows for tokens in row["reply_tokens"][1:]]),
        "conversation/turns_mean": fmean(len(row["reply_tokens"]) for row in rows),
        **{f"conversation/ended/{ended}": fmean(row["ended"] == ended for row in rows) for ended in get_args(Ending)},
        "conversation/failure_rate": fmean(bool(row["score"]["failures"]) for row in rows),
        "judge/failure_rate": fmean(any(name != USER for name in row["score"]["failures"]) for row in rows),
        "user/failure_rate": fmean(USER in row["score"]["failures"] for row in rows),
    }
    for name, values in _by_component(rewards, components):
        metrics[f"reward/{name}"] = fmean(values)
    penalties = [reward["overlong"] for reward in rewards]
    if any(penalties):
        metrics["reward/overlong"] = fmean(penalties)
    words = [row["score"]["notes"]["bleu_word"] for row in rows if "bleu_word" in row["score"]["notes"]]
    if words:
        metrics["reward/bleu_word"] = fmean(words)
    overlaps = [row["user_reference_overlap"] for row in rows if row["user_reference_overlap"] is not None]
    if overlaps:
        metrics["user/reference_overlap"] = fmean(overlaps)
    return metrics


def group_metrics(rows: Sequence[Mapping[str, Any]], components: Iterable[str]) -> dict[str, float]:
    """Of trace rows that were trained on: how rewards spread, and the advantages they give.

    `reward/zero_std_groups` counts groups whose advantages are all 0. Advantages are those of valid replies; where
    there are none, nothing is told of them.
    """
    replies = [row for row in rows if row["continuation"] == 0]
    valid = [row for row in replies if row["reward"]["total"] is not None]
    totals = [row["reward"]["total"] for row in valid]
    groups: dict[str, list[float]] = {}
    for row in replies:
        groups.setdefault(row["scenario_id"], []).append(row["advantage"])
    num_without = sum(not any(group) for group in groups.values())
    metrics = {
        "reward/std": pstdev(totals) if totals else float("nan"),
        "reward/zero_std_groups": float(num_without),
        "reward/zero_std_fraction": num_without / len(groups),
    }
    for name, values in _by_component([row["reward"] for row in valid], components):
        metrics[f"reward/{name}_std"] = pstdev(values)
    advantages = [row["advantage"] for row in valid]
    if advantages:
        metrics |= {
            "advantage/mean": fmean(advantages),
            "advantage/std": pstdev(advantages),
            "advantage/min": min(advantages),
            "advantage/max": max(advantages),
            "advantage/zero_fraction": fmean(advantage == 0 for advantage in advantages),
        }
    return metrics


def experience_metrics(traces: Sequence[Mapping[str, Any]], components: Sequence[str]) -> dict[str, float]:
    """Of all trace rows of a step, those of groups that others replaced included."""
    trained = [row for row in traces if not row["replaced"]]
    refilled = {row["scenario_id"] for row in traces if row["replaced"]}
    return (
        conversation_metrics(trained, components)
        | group_metrics(trained, components)
        | {"rollout/refilled_groups": float(len(refilled))}
    )


@dataclass(frozen=True, slots=True)
class StepShare:
    """What one rank knows of a step."""

    traces: list[dict[str, Any]]
    """The rows that this rank writes (`grpo.evidence.traces.trace_rows`)."""
    counts: Mapping[str, float]
    """What its roles and its engine did for the step."""
    totals: Mapping[str, float]
    """The same since the run began."""
    peaks_gib: Mapping[str, float]
    """Memory by phase."""
    flops: float
    """Operations of its update."""


def step_metrics(
    traces: Sequence[Mapping[str, Any]],
    shares: Sequence[StepShare],
    components: Sequence[str],
    seconds: Mapping[str, float],
    step_seconds: float,
    peak_tflops: float | None,
) -> dict[str, float]:
    """All metrics of a step but those of its update, from what all ranks know of it; `total/` are counts since the run
    began.

    `traces` are the rows of all shares. `seconds` by phase, on this rank. `peak_tflops`: what one card can do; None: unknown.
    """
    totals = summed([share.totals for share in shares])
    metrics = summed([share.counts for share in shares]) | {f"total/{name}": count for name, count in totals.items()}
    metrics["rollout/prefix_hit_rate"] = metrics["policy/cached_tokens"] / max(metrics["policy/prompt_tokens"], 1)
    metrics["rollout/weight_version"] = float(traces[0]["weight_version"])
    metrics |= experience_metrics(traces, components)
    peaks, flops = [share.peaks_gib for share in shares], [share.flops for share in shares]
    return metrics | machine_metrics(seconds, step_seconds, sampled_tokens(traces), peaks, flops, peak_tflops)


def machine_metrics(
    seconds: Mapping[str, float],
    step_seconds: float,
    num_sampled: int,
    peaks_gib: Sequence[Mapping[str, float]],
    flops: Sequence[float],
    peak_tflops: float | None,
) -> dict[str, float]:
    """What a step took: seconds and memory by phase, tokens sampled per second, operations per second of its update.

    `peaks_gib` and `flops` (operations of the update) by rank. `peak_tflops`: what one card can do; None: unknown.
    """
    metrics = {f"time/{name}": value for name, value in seconds.items()}
    metrics |= {"time/step": step_seconds, "tokens_per_second": num_sampled / step_seconds}
    metrics |= {f"memory/{name}_gib": max(peak[name] for peak in peaks_gib) for name in peaks_gib[0]}
    metrics["memory/peak_gib"] = max(value for peak in peaks_gib for value in peak.values())
    metrics["perf/update_tflops"] = fmean(flops) / seconds["update"] / 1e12
    if peak_tflops is not None:
        metrics["perf/mfu"] = metrics["perf/update_tflops"] / peak_tflops
    return metrics


def sampled_tokens(rows: Sequence[Mapping[str, Any]]) -> int:
    """Tokens the policy sampled: a first reply once, later ones for each conversation."""
    first = sum(sum(row["reply_tokens"][:1]) for row in rows if row["continuation"] == 0)
    return first + sum(sum(row["reply_tokens"][1:]) for row in rows)


def role_counts(clients: Mapping[str, LLMClient]) -> dict[str, float]:
    """`<role>/<count>` of what this rank's clients did so far.

    `seconds` are in flight, summed over calls: parallel ones count each. `errors/<kind>` are tries without a usable
    answer, `failures/<kind>` questions given up, by kind of LLMError, of the kinds there were.
    """
    counts = {}
    for role, client in clients.items():
        counts |= {f"{role}/{name}": float(getattr(client.counts, name)) for name in COUNTED}
        for name in ("errors", "failures"):
            counts |= {f"{role}/{name}/{kind}": float(n) for kind, n in getattr(client.counts, name).items()}
    return counts


def summed(shares: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Counts of all ranks, name by name."""
    return {name: sum(share.get(name, 0.0) for share in shares) for name in dict.fromkeys(chain(*shares))}


def _by_component(rewards: Sequence[Mapping[str, Any]], components: Iterable[str]) -> Iterator[tuple[str, list[float]]]:
    """Each component that was measured, with its mean of every reply that has one."""
    for name in components:
        if values := [reward["means"][name] for reward in rewards if name in reward["means"]]:
            yield name, values


def _lengths(of: str, tokens: Collection[int]) -> dict[str, float]:
    """Mean, least and most; nothing where there are none."""
    if not tokens:
        return {}
    return {
        f"{of}/length_mean": fmean(tokens),
        f"{of}/length_min": float(min(tokens)),
        f"{of}/length_max": float(max(tokens)),
    }


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return fmean(values) if values else 0.0
