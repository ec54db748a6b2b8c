"""Packing several replies behind one prompt changes nothing but the time it takes."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from grpo.logprobs import LogprobModel
from grpo.packing import TrainSequence, idle_batch, pack, plan_micro_batches

TEMPERATURE = 0.7
SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


def sequence(prompt, response, advantage=1.0, weight=1.0):
    return TrainSequence(tuple(prompt), tuple(response), (0.0,) * len(response), advantage, weight)


GROUPS = [
    sequence([1, 2, 3, 4], [5, 6, 7], advantage=0.5),
    sequence([1, 2, 3, 4], [8], advantage=-1.0),
    sequence([1, 2, 3, 4], [9, 10, 11, 12, 13], advantage=0.25),
    sequence([20, 21], [22, 23], advantage=2.0),
    sequence([20, 21], [24, 25, 26, 27], advantage=-0.5),
]


def tiny(config_class, **changes):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(**SMALL, **changes), attn_implementation="sdpa")
    return LogprobModel(model.eval(), TEMPERATURE)


def by_hand(model, sequences):
    """Log-probs of each sequence alone, from the model's own logits."""
    rows = []
    for item in sequences:
        logits = model.causal_lm(torch.tensor([item.prompt_ids + item.response_ids])).logits[0] / TEMPERATURE
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


@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen2Config, Qwen3Config])
@pytest.mark.parametrize(("share_prompt", "max_tokens"), [(True, 64), (True, 12), (False, 64), (False, 9)])
def test_packed_and_padded_logprobs_equal_those_of_each_sequence_alone(config_class, share_prompt, max_tokens):
    model = tiny(config_class)
    micro_batches = plan_micro_batches(GROUPS, max_tokens=max_tokens, share_prompt=share_prompt)
    torch.testing.assert_close(flat_in_row_order(model, micro_batches), by_hand(model, GROUPS), atol=1e-5, rtol=1e-5)


def test_packed_and_padded_gradients_are_equal():
    def gradient(share_prompt):
        model = tiny(LlamaConfig)
        for rows in plan_micro_batches(GROUPS, max_tokens=64, share_prompt=share_prompt):
            batch = pack(rows)
            (model(batch)[0] * batch.advantages_N).sum().backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    packed, padded = gradient(True), gradient(False)
    assert (packed - padded).norm() / padded.norm() < 1e-5


def test_a_row_is_laid_out_as_the_drawing_says():
    batch = pack(plan_micro_batches([sequence([1, 2, 3], [4, 5, 6]), sequence([1, 2, 3], [7, 8])], max_tokens=20)[0])
    assert batch.input_ids_RL.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert batch.position_ids_RL.tolist() == [[0, 1, 2, 3, 4, 5, 3, 4]]
    assert batch.segment_RL.tolist() == [[0, 0, 0, 1, 1, 1, 2, 2]]
    assert batch.target_N.tolist() == [4, 5, 6, 7, 8]
    assert batch.predictor_N.tolist() == [2, 3, 4, 2, 6]
    assert batch.sequence_N.tolist() == [0, 0, 0, 1, 1]
    mask = batch.attention_mask()[0, 0]
    assert mask[6].tolist() == [True, True, True, False, False, False, True, False]  # 7 sees the prompt and itself


def test_every_sequence_lands_in_one_row_and_no_micro_batch_exceeds_the_budget():
    micro_batches = plan_micro_batches(GROUPS, max_tokens=12)
    packed = [pack(rows) for rows in micro_batches]
    assert sorted(token for batch in packed for token in batch.target_N.tolist()) == sorted(
        token for item in GROUPS for token in item.response_ids
    )
    assert all(batch.input_ids_RL.numel() <= 12 for batch in packed)


def test_entropy_of_a_flat_distribution_is_the_log_of_the_vocabulary():
    model = tiny(LlamaConfig)
    torch.nn.init.zeros_(model.causal_lm.lm_head.weight)
    _, entropy = model(pack(plan_micro_batches(GROUPS, max_tokens=64)[0]))
    torch.testing.assert_close(entropy, torch.full_like(entropy, 64.0).log())


def test_temperature_sharpens_the_distribution():
    batch = pack(plan_micro_batches(GROUPS, max_tokens=64)[0])
    cold, warm = tiny(LlamaConfig), tiny(LlamaConfig)
    warm.temperature = 2.0
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
