"""Work is dealt to the ranks: conversations by their number, training sequences by what they cost.

Every rank computes the same deal from the same numbers, so nobody has to be told. What cannot be known before it is
sampled is dealt by count: whole groups in turn, since siblings share their prompt in an engine's cache, and the groups
that do not come out even sample by sample.

What is trained on is known, and is dealt by cost. The unit of cost is a token that goes through the model: a unit of
work costs its own tokens wherever it is computed, and its prompt once in every share that holds it or a sibling. So a
group is split only where another prompt costs less than waiting for the busiest share. This is makespan scheduling
with set-up times on identical machines, and the method is that of dual approximation (Hochbaum and Shmoys, 1987): fill
the shares one by one up to a level, and search for the lowest level at which everything finds its place.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import count

PRECISION = 0.002
"""Of the level found, relative to the bound that no deal is below: a finer search hardly finds a better deal."""


@dataclass(frozen=True, slots=True)
class Work:
    """A unit of work, which is never split: one training sequence, or all of a sample."""

    prompt: Hashable
    """Which prompt it begins with. Units with the same one compute it once, where they are in the same share."""
    prompt_tokens: int
    own_tokens: int

    @property
    def tokens(self) -> int:
        """What it costs alone."""
        return self.prompt_tokens + self.own_tokens


def share_tokens(share: Sequence[Work]) -> int:
    """What all of it costs together: each prompt once."""
    prompts = {work.prompt: work.prompt_tokens for work in share}
    return sum(prompts.values()) + sum(work.own_tokens for work in share)


def deal(works: Sequence[Work], num_shares: int) -> list[list[int]]:
    """Indices of `works` by share, the most expensive share first; the last ones are empty where there are too few."""
    if not works:
        return [[] for _ in range(num_shares)]
    low = high = lowest_level(works, num_shares)
    step = PRECISION * low
    while (found := _fill(works, num_shares, high)) is None:
        low, high, step = high, high + step, 2 * step
    while high - low > PRECISION * low:
        middle = (low + high) / 2
        better = _fill(works, num_shares, middle)
        if better is None:
            low = middle
        else:
            found, high = better, middle
    return sorted(found, key=lambda share: -share_tokens([works[index] for index in share]))


def deal_in_rounds(works: Sequence[Work], num_ranks: int, most_tokens: int) -> list[list[list[int]]]:
    """[rank][round] → indices of `works`, in as few rounds as will do with shares of at most `most_tokens` each.

    A round is what the ranks compute side by side, and wait for each other after: its shares cost about the same. A
    unit of work that is more than `most_tokens` by itself raises ValueError.
    """
    if works and max(work.tokens for work in works) > most_tokens:
        raise ValueError(f"a unit of work takes more than {most_tokens} tokens")
    for num_rounds in count(-(-share_tokens(works) // (num_ranks * most_tokens))):
        shares = deal(works, num_ranks * num_rounds)
        if all(share_tokens([works[index] for index in share]) <= most_tokens for share in shares):
            break
    # The most expensive shares make one round, the next the other way round, so that nobody always has the most.
    rounds = [shares[start : start + num_ranks] for start in range(0, len(shares), num_ranks)]
    rounds = [side_by_side[:: -1 if number % 2 else 1] for number, side_by_side in enumerate(rounds)]
    return [[side_by_side[rank] for side_by_side in rounds] for rank in range(num_ranks)]


def lowest_level(works: Sequence[Work], num_shares: int) -> float:
    """Tokens that the busiest share has in any deal of whole units, at least.

    The mean, with every prompt computed once. And of the k · num_shares + 1 largest units, one share gets k + 1 (with
    k = 0: the largest has to go somewhere); the same holds for the prompts.
    """
    shortest: dict[Hashable, Work] = {}
    for work in works:
        if work.prompt not in shortest or work.own_tokens < shortest[work.prompt].own_tokens:
            shortest[work.prompt] = work
    own = sorted((work.own_tokens for work in works), reverse=True)
    least_prompt = min(work.prompt_tokens for work in works)
    groups = sorted((work.tokens for work in shortest.values()), reverse=True)
    crowded = [least_prompt + sum(own[last - last // num_shares : last + 1]) for last in range(0, len(own), num_shares)]
    crowded += [sum(groups[last - last // num_shares : last + 1]) for last in range(0, len(groups), num_shares)]
    return max(share_tokens(works) / num_shares, max(work.tokens for work in works), *crowded)


def _fill(works: Sequence[Work], num_shares: int, level: float) -> list[list[int]] | None:
    """Shares of at most `level` tokens each, or None where these do not hold everything.

    Each begins with the longest unit there is, which gets harder to place, and as many of its siblings as fit. Then
    come whole groups, largest first, and last a part of the one that fills what room is left best.
    """
    rest: dict[Hashable, list[int]] = {}
    for index in sorted(range(len(works)), key=lambda index: -works[index].own_tokens):
        rest.setdefault(works[index].prompt, []).append(index)
    shares = []
    for _ in range(num_shares):
        share: list[int] = []
        room = level
        while rest:
            if share:
                fitting = [siblings for siblings in rest.values() if works[siblings[-1]].tokens <= room]
            else:
                fitting = [max(rest.values(), key=lambda siblings: works[siblings[0]].tokens)]
            if not fitting:
                break
            parts = [_part(works, siblings, room) for siblings in fitting]
            tokens, taken, left = max(parts, key=lambda part: (not part[2], part[0]))
            share += taken
            room -= tokens
            prompt = works[taken[0]].prompt
            if left:
                rest[prompt] = left
            else:
                del rest[prompt]
        shares.append(share)
    return None if rest else shares


def _part(works: Sequence[Work], siblings: Sequence[int], room: float) -> tuple[int, list[int], list[int]]:
    """(tokens, the siblings that fit into the room with their prompt, the others), longest first."""
    tokens = works[siblings[0]].prompt_tokens
    taken, left = [], []
    for index in siblings:
        fits = tokens + works[index].own_tokens <= room
        (taken if fits else left).append(index)
        tokens += fits * works[index].own_tokens
    return tokens, taken, left


def deal_samples(num_prompts: int, group_size: int, num_ranks: int) -> list[list[tuple[int, range]]]:
    """[rank] → (number of a prompt, which of its samples), shares that differ by one sample at most.

    Whole groups in turn as long as every rank gets one; the samples of the others in equal runs.
    """
    whole = num_prompts - num_prompts % num_ranks
    shares = [[(prompt, range(group_size)) for prompt in range(rank, whole, num_ranks)] for rank in range(num_ranks)]
    num_samples = (num_prompts - whole) * group_size
    for rank, share in enumerate(shares):
        start, end = (num_samples * edge // num_ranks for edge in (rank, rank + 1))
        for prompt in range(start // group_size, -(-end // group_size)):
            first = prompt * group_size
            samples = range(max(start - first, 0), min(end - first, group_size))
            if samples:
                share.append((whole + prompt, samples))
    return shares
