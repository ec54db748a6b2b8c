"""How evenly the work of an optimizer step is spread over the ranks, and over those of the rollout before it.

    python -m tests.bench.bench_dealing [--traces FOLDER]

Mini-batches of the recipe (8 prompts with 8 replies each; micro-batches of 12,288 tokens), dealt as the update deals
them (`grpo.model.packing`, `grpo.dealing`) and, to compare, as whole groups in turn. Nothing is computed but the deals: half
a minute on one core. Medians of 20 seeds.

busiest     tokens of the busiest rank over the mean of the ranks, prompts counted wherever they are computed
bound       the least that the busiest rank can have in any deal of whole replies (`lowest_level`), over the mean: above
            1 single replies are longer than a rank's share; it counts a prompt once, so that it may be below 1
worst       of the seeds: the busiest rank over the larger of the mean and the bound
extra       prompt tokens computed again because their group is split, over all tokens
waiting     tokens that the ranks wait for, micro-batch by micro-batch, over the mean with nothing computed twice: what
            the update takes, in units of a perfect deal; also of whole groups in turn (`in turn`)

Lengths are log-normal. Of the recipe: prompts of 400 tokens in the middle (sigma 0.6), replies of 420 on average (the
published base model's 2,935 tokens in up to seven replies, sigma 0.6), cut at 2,048. `short`: prompts of 120 (0.4) and
replies of 220 (0.5), cut at 400. A group's replies have half of their spread in common, since a prompt asks for one
kind of reply. With `--traces`, lengths are those of a run instead: groups drawn from the files of its `traces/`.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo.dealing import Work, deal, deal_in_rounds, deal_samples, lowest_level, share_tokens
from grpo.run.recorder import read_rows

PROMPTS, GROUP_SIZE, MAX_TOKENS = 8, 8, 12_288
RANKS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64)
SEEDS = range(20)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens: medians, standard deviations of the logarithm, and the limit of a reply."""

    prompt: float
    prompt_sigma: float
    reply: float
    reply_sigma: float
    limit: int

    def draw(self, seed: int) -> list[Work]:
        """A mini-batch: unit i is reply i % 8 to prompt i // 8."""
        generator = random.Random(seed)
        own_sigma = self.reply_sigma / math.sqrt(2)
        works = []
        for prompt in range(PROMPTS):
            prompt_tokens = math.ceil(generator.lognormvariate(math.log(self.prompt), self.prompt_sigma))
            usual = generator.lognormvariate(math.log(self.reply), own_sigma)
            for _ in range(GROUP_SIZE):
                reply = math.ceil(generator.lognormvariate(math.log(usual), own_sigma))
                works.append(Work(prompt, prompt_tokens, min(reply, self.limit)))
        return works


@dataclass(frozen=True, slots=True)
class Recorded:
    """The groups of a run: the prompt's tokens, and those that each reply of the conversation was sampled with."""

    groups: list[list[tuple[int, int]]]

    @classmethod
    def read(cls, traces: Path) -> Recorded:
        groups: dict[tuple[int, str], list[tuple[int, int]]] = {}
        for file in sorted(traces.glob("step_*.jsonl")):
            for row in read_rows(file):
                if row["continuation"] == 0 and row["reply_tokens"]:
                    group = groups.setdefault((row["step"], row["scenario_id"]), [])
                    group.append((row["prompt_tokens"], sum(row["reply_tokens"])))
        if len(groups) < PROMPTS:
            raise ValueError(
                f"{traces}: {len(groups)} groups in step_*.jsonl, fewer than the {PROMPTS} of a mini-batch"
            )
        return cls([*groups.values()])

    def draw(self, seed: int) -> list[Work]:
        chosen = random.Random(seed).sample(self.groups, PROMPTS)
        return [Work(number, *lengths) for number, group in enumerate(chosen) for lengths in group]


SHAPES = {
    # The mean of a log-normal is its median times exp(sigma² / 2).
    "recipe": Lengths(400, 0.6, 420 / math.exp(0.18), 0.6, 2048),
    "short": Lengths(120, 0.4, 220, 0.5, 400),
}


def loads(works: Sequence[Work], shares: Sequence[Sequence[int]]) -> list[int]:
    return [share_tokens([works[index] for index in share]) for share in shares]


def waiting(works: Sequence[Work], rounds_of_rank: Sequence[Sequence[Sequence[int]]]) -> int:
    return sum(max(loads(works, shares)) for shares in zip(*rounds_of_rank, strict=True))


def in_turn(works: Sequence[Work], num_ranks: int) -> list[list[int]]:
    """Whole groups: prompt p is for rank p % num_ranks."""
    return [[index for index, work in enumerate(works) if work.prompt % num_ranks == rank] for rank in range(num_ranks)]


def waiting_in_turn(works: Sequence[Work], num_ranks: int) -> int:
    """With each rank's share cut into as many micro-batches as the busiest one needs."""
    shares = [[works[index] for index in share] for share in in_turn(works, num_ranks)]
    num_rounds = max(len(deal_in_rounds(share, 1, MAX_TOKENS)[0]) for share in shares)
    return sum(map(max, zip(*(loads(share, deal(share, num_rounds)) for share in shares), strict=True)))


def figures(works: Sequence[Work], num_ranks: int) -> dict[str, float]:
    dealt = loads(works, deal(works, num_ranks))
    before = loads(works, in_turn(works, num_ranks))
    mean, least = statistics.fmean(dealt), share_tokens(works)
    bound = lowest_level(works, num_ranks)
    return {
        "before": max(before) / statistics.fmean(before),
        "busiest": max(dealt) / mean,
        "bound": bound / mean,
        "worst": max(dealt) / max(mean, bound),
        "extra": sum(dealt) / least - 1,
        "waiting in turn": waiting_in_turn(works, num_ranks) / (least / num_ranks),
        "waiting": waiting(works, deal_in_rounds(works, num_ranks, MAX_TOKENS)) / (least / num_ranks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.bench_dealing", description="How evenly an optimizer step is spread over the ranks."
    )
    parser.add_argument("--traces", type=Path, help="traces/ of a run, whose lengths are taken")
    traces = parser.parse_args().traces
    try:
        shapes: dict[str, Lengths | Recorded] = {str(traces): Recorded.read(traces)} if traces else SHAPES
    except ValueError as error:
        parser.error(str(error))
    for name, lengths in shapes.items():
        print(f"{name}: 8 prompts, 8 replies each")
        print("ranks  busiest: in turn   dealt   bound   worst    extra  waiting: in turn  dealt")
        for num_ranks in RANKS:
            rows = [figures(lengths.draw(seed), num_ranks) for seed in SEEDS]
            row = {key: statistics.median(one[key] for one in rows) for key in rows[0]}
            worst = max(one["worst"] for one in rows)
            print(
                f"{num_ranks:5}  {row['before']:16.2f}  {row['busiest']:6.2f}  {row['bound']:6.2f}  {worst:6.3f}  "
                f"{row['extra']:7.1%}  {row['waiting in turn']:16.2f}  {row['waiting']:5.2f}"
            )
    shares = {n: [sum(len(samples) for _, samples in share) for share in deal_samples(16, 8, n)] for n in (6, 7, 8)}
    for num_ranks, counts in shares.items():
        groups = [len(range(rank, 16, num_ranks)) * 8 for rank in range(num_ranks)]
        print(
            f"rollout of 16 x 8 replies on {num_ranks} ranks, busiest / mean: "
            f"{max(groups) * num_ranks / 128:.2f} in turn, {max(counts) * num_ranks / 128:.2f} dealt"
        )


if __name__ == "__main__":
    main()
