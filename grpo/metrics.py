"""What a step's conversations were like: pure functions of its trace rows, over all ranks; and what they cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from statistics import fmean, pstdev
from typing import Any

from rewards.scoring import USER
from rollout.llm_client import LLMClient

COUNTED = ("calls", "retries", "prompt_tokens", "completion_tokens", "seconds")


def conversation_metrics(rows: Sequence[Mapping[str, Any]], components: Iterable[str]) -> dict[str, float]:
    """Metrics of trace rows (`grpo.experience.trace_rows`), one per conversation.

    Rewards, lengths and truncation are those of replies, each counted once however many conversations
    continue it. `reward/zero_std_groups` counts groups whose advantages are all 0. Failure rates are of all
    conversations: `judge/` of those that could not be judged, `user/` of those whose user gave no usable answer,
    `conversation/` of both, which `rewards.max_failure_rate` limits.
    """
    replies = [row for row in rows if row["continuation"] == 0]
    rewards = [row["reward"] for row in replies if row["reward"]["total"] is not None]
    totals = [reward["total"] for reward in rewards]
    advantages: dict[str, list[float]] = {}
    for row in replies:
        advantages.setdefault(row["scenario_id"], []).append(row["advantage"])
    metrics = {
        "reward/mean": fmean(totals) if totals else float("nan"),
        "reward/std": pstdev(totals) if totals else float("nan"),
        "reward/zero_std_groups": float(sum(not any(group) for group in advantages.values())),
        "reward/clamped": _mean(r["clamped"][name] != r["weighted"][name] for r in rewards for name in r["clamped"]),
        "reply/length_mean": _mean(row["reply_tokens"][0] for row in replies if row["reply_tokens"]),
        "reply/truncated": fmean(row["first_reply_cut"] for row in replies),
        "conversation/turns_mean": fmean(len(row["reply_tokens"]) for row in rows),
        "conversation/failure_rate": fmean(bool(row["score"]["failures"]) for row in rows),
        "judge/failure_rate": fmean(any(name != USER for name in row["score"]["failures"]) for row in rows),
        "user/failure_rate": fmean(USER in row["score"]["failures"] for row in rows),
    }
    for name in components:
        values = [reward["means"][name] for reward in rewards if name in reward["means"]]
        if values:
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


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return fmean(values) if values else 0.0
