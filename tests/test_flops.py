"""Operations of an update, by hand and against torch's own count."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3MoeConfig

from grpo.model.flops import ForwardCost, peak_tflops
from grpo.model.packing import TrainSequence, idle_batch, pack, plan_micro_batches

SIZES = {
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "pad_token_id": None,
}
LAYER = 64 + 32 + 32 + 64 + 3 * 8 * 16  # query, key, value, output, and the three of the MLP: 576 weights
HEAD = 8 * 10


def model(config, **changes):
    return AutoModelForCausalLM.from_config(config(**SIZES | changes))


def batch(*replies, share_prompt=True, multiple=1):
    """Of a prompt of three tokens and replies of so many."""
    sequences = [
        TrainSequence((1, 2, 3), (4,) * length, (0.0,) * length, number, 1.0, 1.0)
        for number, length in enumerate(replies)
    ]
    (rows,) = plan_micro_batches(sequences, max_tokens=999, share_prompt=share_prompt)
    return pack(rows, multiple)


def pairs(prompt, *replies):
    return prompt * (prompt + 1) // 2 + sum(reply * prompt + reply * (reply + 1) // 2 for reply in replies)


@pytest.mark.parametrize("tied", [True, False])
def test_a_row_of_two_replies_by_hand(tied):
    cost = ForwardCost.of(model(LlamaConfig, tie_word_embeddings=tied))
    # Six tokens meet the layers, three are predicted. A pair costs 4 operations in each of the 8 channels.
    assert pairs(3, 2, 1) == 6 + (6 + 3) + (3 + 1) == 19
    expected = 2 * (2 * LAYER) * 6 + 2 * HEAD * 3 + 2 * 4 * 8 * 19
    assert cost.forward(batch(2, 1)) == expected == 15520
    assert cost.forward(batch(2, 1, multiple=16)) == expected  # padding costs nothing


def test_a_prompt_that_nobody_shares_counts_as_often_as_it_is_computed():
    cost = ForwardCost.of(model(LlamaConfig))
    assert cost.forward(batch(2, 1, share_prompt=False)) == cost.forward(batch(2)) + cost.forward(batch(1))
    assert cost.forward(idle_batch(16)) == 2 * (2 * LAYER) * 2 + 2 * HEAD + 2 * 4 * 8 * pairs(1, 1)


def test_matrices_cost_what_torch_counts():
    causal_lm = model(LlamaConfig, tie_word_embeddings=False)
    with FlopCounterMode(display=False) as counter:
        causal_lm(torch.tensor([[1, 2, 3, 4, 5]]))
    cost = ForwardCost.of(causal_lm)
    counted = counter.get_flop_counts()["Global"]
    assert counted[torch.ops.aten.mm] == 2 * (cost.body + cost.head) * 5


def test_layers_with_a_window_look_back_no_further():
    cost = ForwardCost.of(model(MistralConfig, sliding_window=4))
    assert cost.forward(batch(3)) == 2 * (2 * LAYER) * 6 + 2 * HEAD * 3 + 2 * 4 * 8 * (10 + 2 * 4)
    mixed = ForwardCost.of(
        model(LlamaConfig, sliding_window=4, layer_types=["full_attention", "sliding_attention"])
    )
    assert mixed.forward(batch(3)) == 2 * (2 * LAYER) * 6 + 2 * HEAD * 3 + 4 * 8 * (21 + 18)


def test_of_experts_those_count_that_are_chosen():
    causal_lm = model(
        Qwen3MoeConfig,
        num_hidden_layers=1,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=4,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )
    attention, router, expert = 64 + 32 + 32 + 64, 8 * 4, 3 * 8 * 4
    assert ForwardCost.of(causal_lm).body == attention + router + 2 * expert


@pytest.mark.parametrize(
    ("card", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA B200", 2250),
        ("NVIDIA A10G", None),
        ("NVIDIA GeForce RTX 2080 Ti", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("", None),
    ],
)
def test_the_peak_of_a_card(card, peak):
    assert peak_tflops(card, torch.bfloat16) == peak
    assert peak_tflops(card, torch.float32) is None
