"""The gradient of an optimizer step is one number per weight, however the batch is cut, ordered or spread."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from grpo.loss import aggregation_weights, kl_penalty, policy_loss, sampling_correction
from grpo.model.attention import choose_attention
from grpo.model.logprobs import LogprobModel
from grpo.model.packing import TrainSequence, pack, plan_micro_batches
from tests.programs import gradient_program as program
from tests.tiny import make_model
from tests.torchrun import torchrun


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def run_program(num_ranks, model, folder, dtype):
    torchrun(num_ranks, "tests.programs.gradient_program", model, folder / "gradients.pt", dtype)
    return torch.load(folder / "gradients.pt")


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def gradients(model, tmp_path_factory, request):
    return request.param, run_program(request.param, model, tmp_path_factory.mktemp("gradients"), "float32")


@pytest.fixture(scope="module")
def plain(model):
    """The same step written out in float64, whole logits, one sequence at a time: (gradient, KL [P][G])."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    for weight in reference.parameters():
        weight.data.mul_(0.9)

    def table(network, reply):
        logits = network(torch.tensor([reply.prompt_ids + reply.token_ids])).logits[0] / program.TEMPERATURE
        return logits.log_softmax(-1)[len(reply.prompt_ids) - 1 : -1]

    num_valid = sum(reward.valid for group in program.groups() for reward in group.rewards_G)
    kl_PG = []
    for group, advantages in zip(program.groups(), program.ADVANTAGES, strict=True):
        kl_PG.append([0.0] * 4)
        for sample, (reply, advantage) in enumerate(zip(group.replies_G, advantages, strict=True)):
            if not group.rewards_G[sample].valid:
                continue
            rows = torch.arange(len(reply.token_ids)), torch.tensor(reply.token_ids)
            distribution = table(policy, reply)
            logprobs, ref = distribution[rows], table(reference, reply)[rows].detach()
            kl_PG[-1][sample] = (logprobs - ref).sum().item()
            correction = (logprobs.detach() + 3.0).exp().clamp(max=2.0)  # the sampler said -3 for every token
            ratio = (logprobs - logprobs.detach()).exp()
            k3 = (ref - logprobs).exp() - (ref - logprobs) - 1
            entropy = -(distribution.exp() * distribution).sum(-1)
            ((-correction * ratio * advantage + 0.1 * k3 - 0.01 * entropy).mean() / num_valid).backward()
    return torch.cat([weight.grad.flatten() for weight in policy.parameters()]), kl_PG


def distance(one, other):
    return ((one.double() - other.double()).norm() / other.double().norm()).item()


def test_every_split_order_and_share_gives_the_gradient_of_plain_torch(gradients, plain):
    num_ranks, results = gradients
    for case, (_, gradient, *_) in results.items():
        if case != "kl":
            assert distance(gradient, plain[0]) < 1e-5, case
    cut = [results[f"{number} micro-batches"][0] for number in program.BUDGETS]
    assert cut == ([1, 2, 4, 8] if num_ranks == 1 else [1, 1, 2, 4])


def test_every_sample_is_trained_on_by_one_rank_and_groups_may_be_split(gradients):
    num_ranks, results = gradients
    group_of_sample = [group.position for group in program.groups() for reward in group.rewards_G if reward.valid]
    for case, result in results.items():
        if case == "kl":
            continue
        shares = result[2]
        groups_by_rank = [{group_of_sample[sample] for sample in share} for share in shares]
        assert sorted(sample for share in shares for sample in share) == list(range(15)), case
        if case == "every group on every rank":
            assert groups_by_rank == [{0, 1, 2, 3}] * num_ranks
        elif case == "idle ranks":
            assert groups_by_rank == [set()] * (num_ranks - 1) + [{0, 1, 2, 3}]
        else:
            assert all(groups_by_rank), case


def test_the_kl_of_a_reply_is_summed_over_its_tokens_for_the_reward(gradients, plain):
    kl_PG, mean_kl = gradients[1]["kl"]
    for found, expected in zip(kl_PG, plain[1], strict=True):
        assert found == pytest.approx(expected, abs=1e-4)
    num_tokens = sum(
        len(reply.token_ids)
        for group in program.groups()
        for reply, reward in zip(group.replies_G, group.rewards_G, strict=True)
        if reward.valid
    )
    assert mean_kl == pytest.approx(sum(map(sum, plain[1])) / num_tokens, rel=1e-3)


def small_gpt2():
    """Llama's norms compute in float32 whatever they are given; GPT-2's do not."""
    config = GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return config


def test_in_float64_one_rank_and_two_differ_by_rounding_alone(tmp_path):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(small_gpt2()).save_pretrained(tmp_path / "model")
    results = []
    for num_ranks in (1, 2):
        (tmp_path / str(num_ranks)).mkdir()
        results.append(run_program(num_ranks, tmp_path / "model", tmp_path / str(num_ranks), "float64"))
    expected = results[0]["1 micro-batches"][1]
    assert expected.dtype == torch.float64 and expected.norm() > 0
    for result in results:
        for case, (_, gradient, *_) in result.items():
            if case != "kl":
                assert distance(gradient, expected) < 1e-9, case


@pytest.mark.parametrize("variant", ["grpo", "gspo", "cispo"])
@pytest.mark.parametrize("aggregate", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"])
def test_in_float64_eight_micro_batches_differ_from_one_by_rounding_alone(variant, aggregate):
    """Uneven lengths, any order, packed and padded; old log-probs that differ, so that clipping is at work."""
    torch.manual_seed(0)
    config = small_gpt2()
    attention = choose_attention(config, torch.device("cpu"))
    causal_lm = AutoModelForCausalLM.from_config(config, attn_implementation=attention.implementation).double()
    network = LogprobModel(causal_lm, attention, temperature=0.9)
    replies = [reply for group in program.groups() for reply in group.replies_G]
    lengths = torch.tensor([len(reply.token_ids) for reply in replies])
    weights = aggregation_weights(
        lengths, aggregate, step_tokens=int(lengths.sum()), step_sequences=len(replies), max_tokens=16
    )
    advantages = [advantage for row in program.ADVANTAGES for advantage in row]
    sequences = [
        TrainSequence(reply.prompt_ids, reply.token_ids, reply.logprobs, number, advantage, weight)
        for number, (reply, advantage, weight) in enumerate(zip(replies, advantages, weights.tolist(), strict=True))
    ]
    offsets = torch.linspace(-0.4, 0.4, 40, dtype=torch.float64)

    def gradient(budget, share_prompt=True, order=None):
        network.zero_grad()
        chosen = sequences if order is None else random.Random(order).sample(sequences, len(sequences))
        planned = plan_micro_batches(chosen, max_tokens=budget, share_prompt=share_prompt, pair_cost=0.01)
        for rows in planned:
            batch = pack(rows)
            logprobs, _ = network(batch)
            old = logprobs.detach() + offsets[batch.target_N]
            loss = policy_loss(logprobs, old, batch.advantages_N, batch.sequence_N, variant=variant).loss_N
            loss = loss * sampling_correction(old, old - 0.1, batch.sequence_N, mode="sequence", cap=2.0)
            loss = loss + 0.1 * kl_penalty(logprobs, old, "low_var_kl")
            (batch.weights_N * loss).sum().backward()
        return len(planned), torch.cat([weight.grad.flatten() for weight in network.parameters()])

    one, expected = gradient(4096)
    assert one == 1
    for options in ({"budget": 100}, {"budget": 48}, {"budget": 25}, {"budget": 64, "share_prompt": False}):
        for order in (None, 1, 2):
            number, found = gradient(**options, order=order)
            assert number > 1 and distance(found, expected) < 1e-9, (options, order, number)
