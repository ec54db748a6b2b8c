"""Work is spread evenly, each unit of it goes to one rank, and who does it changes nothing else."""

from __future__ import annotations

import random
from itertools import chain, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.dealing import Work, deal, deal_in_rounds, deal_samples, lowest_level, share_tokens
from grpo.run.recorder import write_rows
from tests.bench.bench_dealing import RANKS, SHAPES, Recorded, figures


def works_of(*groups):
    """(prompt tokens, tokens of each reply) → works."""
    return [Work(prompt, tokens, own) for prompt, (tokens, replies) in enumerate(groups) for own in replies]


def loads(works, shares):
    return [share_tokens([works[index] for index in share]) for share in shares]


works_strategy = st.lists(
    st.tuples(st.integers(1, 400), st.lists(st.integers(1, 200), min_size=1, max_size=6)), min_size=1, max_size=6
).map(lambda groups: works_of(*groups))


def test_a_group_is_split_only_where_another_prompt_costs_less_than_waiting():
    two = works_of((100, [50] * 4), (100, [50] * 4))
    assert loads(two, deal(two, 2)) == [300, 300]
    # In 250 tokens there is room for three replies of one group, or for one where both prompts are: eight do not fit
    # into three shares. In 300 they do, and whole groups cost least.
    assert loads(two, deal(two, 3))[0] == 300
    assert loads(two, deal(two, 4)) == [200, 200, 200, 200]
    # A long prompt and short replies: half of them each, and the prompt twice.
    one = works_of((1500, [64] * 8))
    assert loads(one, deal(one, 2)) == [1500 + 4 * 64] * 2


def test_a_long_reply_takes_along_what_fits_and_no_more_ranks_than_help_are_taken():
    works = works_of((10, [900, 100, 100]), (10, [300, 290, 280]))
    assert loads(works, deal(works, 2)) == [10 + 900 + 100, 10 + 100 + 10 + 300 + 290 + 280]
    assert loads(works, deal(works, 6)) == [910, 880, 210, 0, 0, 0]
    assert deal([], 2) == [[], []]


@given(works=works_strategy, num_shares=st.integers(1, 9))
def test_every_unit_is_dealt_once_and_the_busiest_share_is_never_below_the_bound(works, num_shares):
    shares = deal(works, num_shares)
    assert len(shares) == num_shares and sorted(chain.from_iterable(shares)) == list(range(len(works)))
    found = loads(works, shares)
    assert found == sorted(found, reverse=True)
    assert found[0] >= lowest_level(works, num_shares) * (1 - 1e-9)
    assert deal(works, num_shares) == shares


@pytest.mark.parametrize("seed", range(12))
def test_the_deal_comes_close_to_the_best_of_all_deals(seed):
    draw = random.Random(seed)
    works = works_of(*[(draw.randint(1, 100), [draw.randint(1, 200) for _ in range(3)]) for _ in range(2)])
    for num_shares in (2, 3):
        deals = product(range(num_shares), repeat=len(works))
        best = min(
            max(loads(works, [[i for i, share in enumerate(one) if share == n] for n in range(num_shares)]))
            for one in deals
        )
        assert lowest_level(works, num_shares) <= best <= loads(works, deal(works, num_shares))[0] <= 1.15 * best


@pytest.mark.parametrize("num_ranks", RANKS)
def test_the_busiest_rank_has_a_tenth_more_than_the_mean_at_most_or_than_its_replies_allow(num_ranks):
    """Mini-batches of 8 prompts and 8 replies. Where ranks get one reply or two, the longest decide (the bound)."""
    for name, lengths in SHAPES.items():
        # Of short prompts with three replies to a rank or fewer, no deal is even.
        limit = 1.1 if name == "recipe" or 64 / num_ranks >= 3 else 1.15
        rows = [figures(lengths.draw(seed), num_ranks) for seed in range(6)]
        assert max(row["worst"] for row in rows) <= limit
        if num_ranks <= 16:
            assert max(row["busiest"] for row in rows if row["bound"] <= 1) <= 1.1


@pytest.mark.parametrize("num_ranks", [6, 7])
def test_eight_prompts_come_out_even_on_ranks_that_do_not_divide_them(num_ranks):
    even = [work for prompt in range(8) for work in [Work(prompt, 400, 450)] * 8]
    row = figures(even, num_ranks)
    assert row["before"] == pytest.approx({6: 1.5, 7: 1.75}[num_ranks]) and row["busiest"] <= 1.1
    assert row["waiting"] < row["waiting in turn"] / 1.25


@given(works=works_strategy, num_ranks=st.integers(1, 5), spare=st.integers(0, 300))
@settings(max_examples=50)
def test_rounds_hold_everything_once_within_the_budget_and_come_out_even(works, num_ranks, spare):
    most = max(work.tokens for work in works) + spare
    by_rank = deal_in_rounds(works, num_ranks, most)
    shares = list(chain.from_iterable(by_rank))
    assert sorted(chain.from_iterable(shares)) == list(range(len(works)))
    assert len(by_rank) == num_ranks and len({len(rounds) for rounds in by_rank}) == 1
    assert max(loads(works, shares)) <= most
    # No share of a round has more than any of the round before.
    of_round = [loads(works, [rounds[number] for rounds in by_rank]) for number in range(len(by_rank[0]))]
    assert all(min(before) >= max(after) for before, after in zip(of_round, of_round[1:], strict=False))


def test_rounds_are_as_few_as_will_do():
    works = works_of((10, [45, 45, 45, 45]))
    assert deal_in_rounds(works, 1, 190) == [[[0, 1, 2, 3]]]
    assert [len(one) for one in deal_in_rounds(works, 1, 189)[0]] == [2, 2]  # 100 tokens each
    assert [len(rounds) for rounds in deal_in_rounds(works, 2, 100)] == [1, 1]
    assert [len(rounds) for rounds in deal_in_rounds(works, 2, 99)] == [2, 2]
    assert deal_in_rounds([], 2, 10) == [[], []]
    with pytest.raises(ValueError, match="more than 54 tokens"):
        deal_in_rounds(works, 2, 54)


@given(num_prompts=st.integers(0, 40), group_size=st.integers(1, 9), num_ranks=st.integers(1, 17))
def test_samples_are_dealt_once_each_in_shares_that_differ_by_one_at_most(num_prompts, group_size, num_ranks):
    shares = deal_samples(num_prompts, group_size, num_ranks)
    dealt = [(prompt, sample) for share in shares for prompt, samples in share for sample in samples]
    assert sorted(dealt) == list(product(range(num_prompts), range(group_size)))
    counts = [sum(len(samples) for _, samples in share) for share in shares]
    assert max(counts) - min(counts) <= 1


def test_groups_stay_whole_in_one_engine_where_the_ranks_divide_them():
    assert deal_samples(4, 8, 2) == [[(0, range(8)), (2, range(8))], [(1, range(8)), (3, range(8))]]
    # Four ranks share the fifth prompt's samples, and three the two of 2 · 3.
    assert deal_samples(5, 8, 4)[0] == [(0, range(8)), (4, range(2))]
    assert deal_samples(2, 3, 3) == [[(0, range(2))], [(0, range(2, 3)), (1, range(1))], [(1, range(1, 3))]]
    # Held-out prompts have one reply each.
    assert deal_samples(3, 1, 2) == [[(0, range(1))], [(1, range(1)), (2, range(1))]]


def test_the_bench_takes_the_lengths_of_a_runs_traces(tmp_path):
    rows = [
        {"step": step, "scenario_id": name, "continuation": continuation, "prompt_tokens": 7, "reply_tokens": tokens}
        for step, name in product((1, 2), "abcd")
        for continuation, tokens in ((0, [5, 6]), (1, [5, 9]), (0, []), (0, [3]))
    ]
    for step in (1, 2):
        write_rows(tmp_path / f"step_{step:05d}.jsonl", [row for row in rows if row["step"] == step])
    works = Recorded.read(tmp_path).draw(seed=0)
    assert works == works_of(*[(7, [11, 3])] * 8)
    (tmp_path / "step_00002.jsonl").unlink()
    with pytest.raises(ValueError, match="4 groups in step_.*, fewer than the 8"):
        Recorded.read(tmp_path)
