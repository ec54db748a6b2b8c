"""Packing several replies behind one prompt changes nothing but the time it takes."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    GPTNeoConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    RwkvConfig,
)

from grpo.model.attention import PackedAttention, choose_attention
from grpo.model.logprobs import LogprobModel
from grpo.model.packing import PADDING, SEGMENTS, TrainSequence, idle_batch, pack, plan_micro_batches
from grpo.model.prefix_attention import PrefixLayout, attend
from tests.bench.bench_dealing import SHAPES

TEMPERATURE = 0.7
SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


def sequence(prompt, response, number=0, advantage=1.0):
    return TrainSequence(tuple(prompt), tuple(response), (0.0,) * len(response), number, advantage, weight=1.0)


GROUPS = [
    sequence([1, 2, 3, 4], [5, 6, 7], 0, advantage=0.5),
    sequence([1, 2, 3, 4], [8], 1, advantage=-1.0),
    sequence([1, 2, 3, 4], [9, 10, 11, 12, 13], 2, advantage=0.25),
    sequence([20, 21], [22, 23], 3, advantage=2.0),
    sequence([20, 21], [24, 25, 26, 27], 4, advantage=-0.5),
]


def tiny(config_class, wanted="auto", **changes):
    torch.manual_seed(0)
    config = config_class(**SMALL, **changes)
    attention = choose_attention(config, torch.device("cpu"), wanted)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.implementation)
    return LogprobModel(model.eval(), attention, TEMPERATURE)


def by_hand(model, sequences):
    """Log-probs of each sequence alone, from the model's own logits with plain attention."""
    rows, causal_lm = [], deepcopy(model.causal_lm)
    causal_lm.set_attn_implementation("eager")
    for item in sequences:
        logits = causal_lm(torch.tensor([item.prompt_ids + item.response_ids])).logits[0] / TEMPERATURE
        start = len(item.prompt_ids)
        logprobs = logits.log_softmax(-1)[start - 1 : -1]
        rows.append(logprobs[range(len(item.response_ids)), list(item.response_ids)])
    return torch.cat(rows)


def flat_in_row_order(model, micro_batches):
    """(log-probs by target token) over all micro-batches: targets are unique in GROUPS."""
    found = {}
    for rows in micro_batches:
        batch = pack(rows)
        logprobs, _ = model(batch)
        found |= dict(zip(batch.target_N.tolist(), logprobs, strict=True))
    return torch.stack([found[token] for item in GROUPS for token in item.response_ids])


@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen2Config, Qwen3Config, GPT2Config])
@pytest.mark.parametrize("wanted", ["auto", "dense"])
@pytest.mark.parametrize(("share_prompt", "max_tokens"), [(True, 64), (True, 12), (False, 64), (False, 9)])
def test_packed_and_padded_logprobs_equal_those_of_each_sequence_alone(config_class, wanted, share_prompt, max_tokens):
    model = tiny(config_class, wanted)
    assert model.attention.kind == {"auto": "prefix", "dense": "dense"}[wanted]
    micro_batches = plan_micro_batches(GROUPS, max_tokens=max_tokens, share_prompt=share_prompt)
    torch.testing.assert_close(flat_in_row_order(model, micro_batches), by_hand(model, GROUPS), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen2Config, Qwen3Config])
@pytest.mark.parametrize("recompute", [False, True], ids=["", "gradient checkpointing"])
def test_packed_and_padded_gradients_are_equal(config_class, recompute):
    def gradient(wanted, share_prompt):
        model = tiny(config_class, wanted)
        if recompute:
            model.train()
            model.causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
        for rows in plan_micro_batches(GROUPS, max_tokens=64, share_prompt=share_prompt):
            batch = pack(rows)
            (model(batch)[0] * batch.advantages_N).sum().backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    expected = gradient("dense", share_prompt=False)
    for found in (gradient("auto", True), gradient("auto", False), gradient("dense", True)):
        assert (found - expected).norm() / expected.norm() < 1e-5


@given(
    prompts=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=7),
    multiple=st.sampled_from([1, 8]),
    pair_cost=st.sampled_from([0.0, 1e-9]),
)
def test_prefix_attention_is_the_softmax_under_the_dense_mask(prompts, lengths, multiple, pair_cost):
    """Any prompts and lengths, in one row or a row for each prompt, any padding: what the heads read, and the gradients, of attention written out."""
    generator = torch.Generator().manual_seed(0)
    groups = [range(100 * number, 100 * number + length) for number, length in enumerate(prompts)]
    sequences = [sequence(groups[i % len(groups)], [5] * length, i) for i, length in enumerate(lengths)]
    [rows] = plan_micro_batches(sequences, max_tokens=10_000, pair_cost=pair_cost)
    batch = pack(rows, multiple)
    num_rows, length = batch.segment_RL.shape

    def draw(heads):
        return torch.randn(num_rows, heads, length, 8, generator=generator, dtype=torch.float64, requires_grad=True)

    query, key, value = draw(4), draw(2), draw(2)
    layout = PrefixLayout.of(batch.segment_RL, torch.float64)
    read, _ = attend(None, query, key, value, None, scaling=0.3, prefix_layout=layout)
    scores = 0.3 * query @ key.repeat_interleave(2, 1).transpose(2, 3)
    weights = scores.masked_fill(~batch.attention_mask(), -torch.inf).softmax(-1)
    expected = (weights @ value.repeat_interleave(2, 1)).transpose(1, 2)
    real = batch.segment_RL != PADDING
    torch.testing.assert_close(read[real], expected[real])
    counts = torch.randn(read.shape, generator=generator, dtype=torch.float64) * real[:, :, None, None]
    inputs = (query, key, value)
    ours, theirs = (torch.autograd.grad((states * counts).sum(), inputs) for states in (read, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_replies_of_very_different_lengths_are_not_padded_to_the_longest():
    siblings = [sequence([1], [5] * length, number) for number, length in enumerate([100, 10, 9, 1])]
    layout = PrefixLayout.of(pack(plan_micro_batches(siblings, max_tokens=1000)[0]).segment_RL, torch.float32)
    assert [(len(block.prompt_B), block.reply_length) for block in layout.blocks] == [(1, 100), (2, 10), (1, 1)]


def test_a_row_is_laid_out_as_the_drawing_says():
    siblings = [sequence([1, 2, 3], [4, 5, 6], 0), sequence([1, 2, 3], [7, 8], 1)]
    batch = pack(plan_micro_batches(siblings, max_tokens=20)[0])
    assert batch.input_ids_RL.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert batch.position_ids_RL.tolist() == [[0, 1, 2, 3, 4, 5, 3, 4]]
    assert batch.segment_RL.tolist() == [[0, 0, 0, 1, 1, 1, 2, 2]]
    assert batch.target_N.tolist() == [4, 5, 6, 7, 8]
    assert batch.predictor_N.tolist() == [2, 3, 4, 2, 6]
    assert batch.sequence_N.tolist() == [0, 0, 0, 1, 1]
    mask = batch.attention_mask()[0, 0]
    assert mask[6].tolist() == [True, True, True, False, False, False, True, False]  # 7 sees the prompt and itself


def test_a_micro_batch_is_one_row_where_pairs_cost_nothing_and_its_prompts_do_not_see_each_other():
    [[row]] = plan_micro_batches(GROUPS, max_tokens=64)
    batch = pack([row])
    assert len(row) == batch.input_ids_RL.numel() == 4 + 3 + 1 + 5 + 2 + 2 + 4  # nothing twice, no padding
    first, second = sorted(range(2), key=lambda number: -len(row.blocks[number][0].prompt_ids))
    is_first_L = batch.segment_RL[0] // SEGMENTS == first
    assert is_first_L.sum() == 13 and (batch.segment_RL[0] // SEGMENTS == second).sum() == 8
    mask = batch.attention_mask()[0, 0]
    assert not mask[is_first_L][:, ~is_first_L].any() and not mask[~is_first_L][:, is_first_L].any()
    # A prompt sees itself, a reply its prompt and itself: by hand, of lengths 4 (3, 1, 5) and 2 (2, 4).
    pairs = lambda length: length * (length + 1) // 2  # noqa: E731
    assert mask.sum() == pairs(7) + 4 + pairs(1) + 4 * 5 + pairs(5) + pairs(4) + 2 * 4 + pairs(4)
    padded = plan_micro_batches(GROUPS, max_tokens=64, pair_cost=1e-9)
    assert [sorted(map(len, rows)) for rows in padded] == [[8, 13]]


def test_every_sequence_lands_in_one_row_and_no_micro_batch_exceeds_the_budget():
    micro_batches = plan_micro_batches(GROUPS, max_tokens=12)
    packed = [pack(rows) for rows in micro_batches]
    assert sorted(token for batch in packed for token in batch.target_N.tolist()) == sorted(
        token for item in GROUPS for token in item.response_ids
    )
    assert all(batch.input_ids_RL.numel() <= 12 for batch in packed)


def rows_of(*lengths, pair_cost, max_tokens=10_000, prompt=100):
    siblings = [sequence(range(prompt), [1] * n, number) for number, n in enumerate(lengths)]
    return sorted(
        sorted(len(item.response_ids) for item in row.sequences)
        for rows in plan_micro_batches(siblings, max_tokens=max_tokens, pair_cost=pair_cost)
        for row in rows
    )


def test_replies_share_a_row_until_the_square_of_its_length_costs_more_than_another_prompt():
    # Pairs are free: one row. At 1/1000 a pair, one row of 900 tokens costs 900 + 810 = 1710; two of 500 cost
    # 2 (500 + 250) = 1500; four of 300 cost 4 (300 + 90) = 1560.
    assert rows_of(200, 200, 200, 200, pair_cost=0.0) == [[200, 200, 200, 200]]
    assert rows_of(200, 200, 200, 200, pair_cost=0.001) == [[200, 200], [200, 200]]
    assert rows_of(200, 200, 200, 200, pair_cost=1.0) == [[200], [200], [200], [200]]


def test_rows_of_uneven_replies_come_out_about_equal_and_within_the_budget():
    assert rows_of(50, 400, 100, 300, pair_cost=0.0, max_tokens=600) == [[50, 400], [100, 300]]


def test_the_budget_counts_rows_as_they_are_padded():
    siblings = [sequence(range(5), [1] * 5, number) for number in range(4)]
    for multiple, expected in ((1, [4]), (16, [2, 2])):  # 4 rows of 10 tokens, or of 16, in 40
        planned = plan_micro_batches(siblings, max_tokens=40, share_prompt=False, multiple=multiple)
        assert [len(rows) for rows in planned] == expected
        assert all(pack(rows, multiple).input_ids_RL.numel() <= 40 for rows in planned)


def test_a_row_may_be_padded_to_whole_blocks():
    batch = pack(plan_micro_batches(GROUPS, max_tokens=64)[0], multiple=8)
    assert batch.input_ids_RL.shape[1] % 8 == 0
    torch.testing.assert_close(
        tiny(LlamaConfig)(batch)[0], tiny(LlamaConfig)(pack(plan_micro_batches(GROUPS, max_tokens=64)[0]))[0]
    )


@pytest.mark.parametrize(
    ("config_class", "changes"),
    [
        (MistralConfig, {"sliding_window": 3}),
        (Qwen2Config, {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    ],
)
def test_a_model_that_looks_through_a_window_gets_one_sequence_per_row_and_says_so(config_class, changes):
    model = tiny(config_class, **changes)
    assert not model.attention.shares_rows and "sliding_attention" in model.attention.reason
    rows = plan_micro_batches(GROUPS, max_tokens=64, share_prompt=model.attention.shares_rows)
    torch.testing.assert_close(flat_in_row_order(model, rows), by_hand(model, GROUPS), atol=1e-5, rtol=1e-5)


def test_flex_attention_is_taken_on_a_gpu_unless_it_is_unwanted():
    config, gpu = LlamaConfig(**SMALL), torch.device("cuda")
    assert choose_attention(config, gpu).implementation == "flex_attention"
    assert choose_attention(config, gpu, "dense").kind == "dense"
    assert choose_attention(GPT2Config(), gpu).kind == "prefix"  # its class takes no FlexAttention
    with ThreadPoolExecutor(1) as autograds:  # whose thread must not compile less than ours
        assert autograds.submit(lambda: torch._dynamo.config.recompile_limit).result() == 64


@pytest.mark.parametrize(
    ("config", "reason"),
    [(GPTNeoConfig(), "local attention"), (BloomConfig(), "ALiBi"), (RwkvConfig(), "layers without attention")],
)
def test_models_that_count_columns_get_one_sequence_per_row(config, reason):
    attention = choose_attention(config, torch.device("cpu"))
    assert not attention.shares_rows and reason in attention.reason


def test_the_block_mask_of_the_gpu_is_the_dense_mask():
    prompts = tuple(range(5, 155)), tuple(range(5, 45))
    # Replies begin, end and lie within blocks of 128 tokens, and so does the second prompt.
    lengths = ((120, 0), (200, 0), (3, 0), (260, 0), (150, 1), (30, 1))
    replies = [
        TrainSequence(prompts[prompt], (7,) * n, (0.0,) * n, number, 1.0, 1.0)
        for number, (n, prompt) in enumerate(lengths)
    ]
    flex = PackedAttention("flex", 0.0, "flex_attention", "")
    (rows,) = plan_micro_batches(replies, max_tokens=2048, multiple=flex.row_multiple)
    batch = pack(rows, flex.row_multiple)
    block, dense_RHLL = flex.arguments(batch, torch.float32)["attention_mask"], batch.attention_mask()
    # Blocks that the GPU skips hold no pair that may be seen, and those that it takes whole hold no other.
    seen_RHBB = torch.nn.functional.max_pool2d(dense_RHLL.float(), 128).bool()
    whole_RHBB = ~torch.nn.functional.max_pool2d((~dense_RHLL).float(), 128).bool()
    assert block.to_dense().bool().equal(seen_RHBB) and not seen_RHBB.all()
    full = torch.zeros_like(seen_RHBB)
    for r, h, q in product(*map(range, block.full_kv_num_blocks.shape)):
        full[r, h, q, block.full_kv_indices[r, h, q, : block.full_kv_num_blocks[r, h, q]]] = True
    assert full.equal(whole_RHBB) and full.any()
    # And what it then computes is what the mask says.
    generator = torch.Generator().manual_seed(1)
    query, key, value = torch.randn(3, 1, 2, dense_RHLL.shape[-1], 16, generator=generator)
    own = batch.segment_RL[0] != PADDING
    torch.testing.assert_close(
        flex_attention(query, key, value, block_mask=block)[:, :, own],
        torch.nn.functional.scaled_dot_product_attention(query, key, value, dense_RHLL)[:, :, own],
    )


def test_the_entropy_is_trained_on_only_where_it_was_asked_for():
    batch = pack(plan_micro_batches(GROUPS, max_tokens=64)[0])
    plain, bonus = tiny(LlamaConfig), tiny(LlamaConfig)
    bonus.head.entropy_has_gradient = True
    assert not plain(batch)[1].requires_grad
    torch.testing.assert_close(plain(batch)[1], bonus(batch)[1])
    bonus(batch)[1].sum().backward()
    # By hand: the entropy of whole logits, at the tokens that predict the first row's first reply.
    again = tiny(LlamaConfig, "dense")
    states = again.causal_lm.base_model(
        input_ids=batch.input_ids_RL, attention_mask=batch.attention_mask(), position_ids=batch.position_ids_RL
    ).last_hidden_state.flatten(0, 1)[batch.predictor_N]
    table = (again.causal_lm.lm_head(states) / TEMPERATURE).log_softmax(-1)
    (-(table.exp() * table).sum()).backward()
    for one, other in zip(bonus.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-5, rtol=1e-4)


def test_the_head_sees_response_positions_alone():
    model, seen = tiny(LlamaConfig), []
    model.head.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    model(pack(plan_micro_batches(GROUPS, max_tokens=64)[0]))
    assert seen == [15]


def test_a_vocabulary_padded_beyond_the_tokenizer_counts_in_full():
    # The sampler draws from the whole head, so the trainer's distribution is over the whole head too.
    model = tiny(LlamaConfig)
    batch = pack(plan_micro_batches([sequence([1, 2], [63, 5])], max_tokens=64)[0])
    torch.testing.assert_close(model(batch)[0], by_hand(model, [sequence([1, 2], [63, 5])]), atol=1e-5, rtol=1e-5)


def test_entropy_of_a_flat_distribution_is_the_log_of_the_vocabulary():
    model = tiny(LlamaConfig)
    torch.nn.init.zeros_(model.causal_lm.lm_head.weight)
    _, entropy = model(pack(plan_micro_batches(GROUPS, max_tokens=64)[0]))
    torch.testing.assert_close(entropy, torch.full_like(entropy, 64.0).log())


def test_temperature_sharpens_the_distribution():
    batch = pack(plan_micro_batches(GROUPS, max_tokens=64)[0])
    cold, warm = tiny(LlamaConfig), tiny(LlamaConfig)
    warm.head.temperature = 2.0
    assert (warm(batch)[1] > cold(batch)[1]).all()


def test_a_budget_below_one_sequence_names_the_setting():
    with pytest.raises(ValueError, match="max_tokens_per_micro_batch: 8 is less than one sequence of 9"):
        plan_micro_batches(GROUPS, max_tokens=8)


def test_an_empty_reply_is_refused():
    with pytest.raises(ValueError, match="without tokens"):
        plan_micro_batches([sequence([1], [])], max_tokens=8)


def test_an_idle_rank_has_no_gradient():
    model = tiny(LlamaConfig)
    batch = idle_batch()
    (model(batch)[0] * batch.weights_N).sum().backward()
    assert all((parameter.grad == 0).all() for parameter in model.parameters())


def sequences_of(works):
    """A training sequence for each work; prompts differ in their first token."""
    return [
        TrainSequence((work.prompt,) * work.prompt_tokens, (9,) * work.own_tokens, (), number, 1.0, 1.0)
        for number, work in enumerate(works)
    ]


@pytest.mark.parametrize(
    "layout",
    [{}, {"pair_cost": 1e-3}, {"share_prompt": False}, {"multiple": 16}],
    ids=["joined", "dense", "padded", "blocks"],
)
@pytest.mark.parametrize("num_ranks", [1, 3, 6, 70])
def test_every_sequence_is_trained_on_by_one_rank(layout, num_ranks):
    works = SHAPES["short"].draw(seed=1)
    planned = [
        plan_micro_batches(sequences_of(works), max_tokens=1500, rank=rank, num_ranks=num_ranks, **layout)
        for rank in range(num_ranks)
    ]
    counts = Counter(one.number for rank in planned for rows in rank for row in rows for one in row.sequences)
    assert counts == Counter(range(64))
    assert max(len(rows) * max(map(len, rows)) for rank in planned for rows in rank) <= 1500
    if not layout:
        assert all(len(rows) == 1 for rank in planned for rows in rank)
        tokens = [sum(len(row) for rows in rank for row in rows) for rank in planned]
        assert num_ranks == 70 or max(tokens) <= 1.1 * sum(tokens) / num_ranks


@pytest.mark.parametrize("share_prompt", [True, False])
def test_the_sequences_of_a_sample_that_must_stay_whole_are_on_one_rank(share_prompt):
    # Per-turn sequences of eight samples, each with three; alone they would be dealt apart.
    sequences = [
        TrainSequence((turn,) * 5, (9,) * (3 + sample), (), sample, 1.0, 1.0)
        for sample in range(8)
        for turn in range(3)
    ]

    def ranks_of_samples(whole_samples):
        found = {}
        for rank in range(4):
            planned = plan_micro_batches(
                sequences, max_tokens=60, share_prompt=share_prompt, whole_samples=whole_samples, rank=rank, num_ranks=4
            )
            for number, rows in enumerate(planned):
                for one in (one for row in rows for one in row.sequences):
                    found.setdefault(one.number, set()).add((rank, number))
        return found

    assert all(len(places) == 1 for places in ranks_of_samples(True).values())
    assert any(len(places) > 1 for places in ranks_of_samples(False).values())
