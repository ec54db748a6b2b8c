"""Training on all replies of a conversation: exactly what plain torch computes of each turn alone, in float64."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from grpo.config import LossSettings, UpdateSettings
from grpo.config_file import load_config
from grpo.groups import Group
from grpo.model.attention import choose_attention
from grpo.model.logprobs import LogprobModel
from grpo.update import Updater
from rollout.settings import RolloutSettings
from rollout.types import Conversation, Reply, Scenario
from tests.groups import Alone, rewards_of

VOCABULARY, TEMPERATURE, LR = 40, 0.9, 2.0
ADVANTAGES = [[1.0, -1.0, 0.5], [0.25, -0.75, 0.5], [2.0, 0.0, -1.0], [-0.5, 0.5, 0.25]]
NUM_REPLIES = [[3, 1, 2], [2, 2, 3], [3, 3, 2], [2, 3, 2]]
INVALID = (1, 1)
QUICKSTART = Path("configs/quickstart.yaml")


class PlainPolicy:
    """What `Updater` asks of a policy, on one float64 model without DeepSpeed; steps are plain gradient descent."""

    def __init__(self, network: LogprobModel):
        self.network, self.attention = network, network.attention
        self.num_micro_batches: list[int] = []
        """Of each step."""
        self.num_passed = self.num_frozen = 0
        self._waiting = 0
        self.causal_lm = network.causal_lm

    def logprobs(self, batch):
        return self.network(batch)

    @torch.no_grad()
    def frozen_logprobs(self, batch):
        self.num_frozen += 1
        return self.network(batch)[0]

    def backward(self, loss, *, is_last):
        loss.backward()
        self._waiting += 1

    def step(self):
        descend(self.network)
        self.num_micro_batches.append(self._waiting)
        self._waiting = 0
        return 1.0, LR

    def pass_steps(self, number):
        self.num_passed += number


class PlainReference:
    def __init__(self, network: LogprobModel):
        self.network = network

    @torch.no_grad()
    def logprobs(self, batch):
        return self.network(batch)[0]


@torch.no_grad()
def descend(network):
    for weight in network.parameters():
        weight -= LR * weight.grad
        weight.grad = None


def make_network(seed=0, implementation=None) -> LogprobModel:
    torch.manual_seed(seed)
    # Llama's norms compute in float32 whatever they are given; GPT-2's do not.
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=None)
    config.eos_token_id = None
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    attention = choose_attention(config, torch.device("cpu"))
    implementation = implementation or attention.implementation
    causal_lm = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).double()
    return LogprobModel(causal_lm, attention, TEMPERATURE)


def make_groups(form: str) -> list[Group]:
    """Four groups of three conversations; `exact` prompts hold what was sampled, `rewritten` ones other ids for it."""
    generator = torch.Generator().manual_seed(7)

    def draw(low, high):
        n = int(torch.randint(low, high, (1,), generator=generator))
        return tuple(torch.randint(0, VOCABULARY, (n,), generator=generator).tolist())

    groups = []
    for position, nums in enumerate(NUM_REPLIES):
        prompt, asks = draw(4, 8), draw(2, 3)  # `asks` stands for what a template ends a prompt with
        talks = []
        for sample, num in enumerate(nums):
            replies, past = [], prompt
            for _ in range(num):
                token_ids = draw(1, 9)
                reply = Reply(past + asks, token_ids, (-3.0,) * len(token_ids), "", "stop")
                replies.append(reply)
                past = (reply.ids if form == "exact" else past + draw(2, 6)) + draw(2, 5)
            scenario = Scenario(f"s/{position}", ({"role": "user", "content": "x"},), "", "", None, "s", position)
            talks.append((Conversation(scenario, sample, 0, scenario.messages, 1, tuple(replies), "turn_limit"),))
        rewards = rewards_of([(position, sample) != INVALID for sample in range(3)])
        groups.append(Group(talks[0][0].scenario, position, tuple(talks), ((),) * 3, tuple(rewards)))
    return groups


def alone(network: LogprobModel, reply: Reply) -> torch.Tensor:
    """Log-probs of one turn, from the model's whole logits."""
    logits = network.causal_lm(torch.tensor([reply.ids])).logits[0] / TEMPERATURE
    table = logits.log_softmax(-1)[len(reply.prompt_ids) - 1 : -1]
    return table[range(len(reply.token_ids)), list(reply.token_ids)]


def of_sample(network: LogprobModel, group: Group, sample: int) -> torch.Tensor:
    return torch.cat([alone(network, reply) for reply in group.conversations_GC[sample][0].replies])


def in_plain_torch(groups, variant, aggregate, correction) -> list[torch.Tensor]:
    """Two optimizer steps written out, one turn at a time."""
    network = make_network(implementation="eager")
    with torch.no_grad():
        old = {(g.position, s): of_sample(network, g, s) for g in groups for s in range(3)}
    for mini_batch in (groups[:2], groups[2:]):
        members = [(g, s) for g in mini_batch for s in range(3) if g.rewards_G[s].valid]
        num_tokens = sum(len(old[g.position, s]) for g, s in members)
        for group, sample in members:
            now, before = of_sample(network, group, sample), old[group.position, sample]
            advantage = ADVANTAGES[group.position][sample]
            log_ratio = now - before
            if variant == "gspo":
                log_ratio = log_ratio.mean().detach() + now - now.detach()
            ratio = log_ratio.exp()
            loss = torch.maximum(-ratio * advantage, -ratio.clamp(0.8, 1.2) * advantage)
            if correction == "sequence":
                loss = loss * (before + 3.0).mean().exp().clamp(max=2.0)
            denominator = num_tokens if aggregate == "token_mean" else len(now) * len(members)
            (loss.sum() / denominator).backward()
        descend(network)
    return list(network.parameters())


def updater_of(policy, budget, *, reference=None, share_prompt=True, **loss) -> Updater:
    return Updater(
        policy,
        reference,
        LossSettings(**loss),
        UpdateSettings(max_tokens_per_micro_batch=budget, share_prompt=share_prompt),
        mini_batch_prompts=2,
        max_trained_tokens=24,
        max_gap=float("inf"),
        ranks=Alone(0, 1, torch.device("cpu")),
        train_on="all_replies",
    )


@pytest.mark.parametrize("form", ["exact", "rewritten"])
@pytest.mark.parametrize(
    ("variant", "aggregate", "correction"),
    [
        ("grpo", "token_mean", "none"),
        ("grpo", "seq_mean_token_mean", "sequence"),
        ("gspo", "token_mean", "none"),
        ("gspo", "seq_mean_token_mean", "none"),
    ],
)
def test_two_updates_are_those_of_plain_torch_on_each_turn_alone(form, variant, aggregate, correction):
    groups = make_groups(form)
    expected = in_plain_torch(groups, variant, aggregate, correction)
    start = list(make_network().parameters())
    for budget, share_prompt in ((4096, True), (75, True), (100, False)):
        policy = PlainPolicy(make_network())
        updater = updater_of(
            policy, budget, share_prompt=share_prompt, variant=variant, aggregate=aggregate, correction=correction
        )
        updater.update(groups, ADVANTAGES)
        assert all(number == 1 if budget == 4096 else number > 1 for number in policy.num_micro_batches)
        for weight, wanted, before in zip(policy.network.parameters(), expected, start, strict=True):
            moved = (wanted - before).norm()
            assert (weight - wanted).norm() <= 1e-6 * moved and moved > 0


def test_the_second_update_is_off_policy_so_that_a_samples_ratio_matters():
    # Else gspo and grpo would be one, and the test above would show nothing of its mean over turns.
    groups = make_groups("rewritten")
    one, other = (in_plain_torch(groups, variant, "token_mean", "none") for variant in ("grpo", "gspo"))
    start = list(make_network().parameters())
    apart = max(((a - b).norm() / (b - c).norm()).item() for a, b, c in zip(one, other, start, strict=True))
    assert apart > 1e-2


@pytest.mark.parametrize("form", ["exact", "rewritten"])
def test_the_kl_in_the_reward_is_summed_over_all_replies(form):
    groups = make_groups(form)
    updater = updater_of(PlainPolicy(make_network()), 60, reference=PlainReference(make_network(seed=1)))
    kl_PG, mean = updater.reply_kl(groups)
    network, other = (make_network(seed, "eager") for seed in (0, 1))
    num_tokens = 0
    with torch.no_grad():
        for group, sample in itertools.product(groups, range(3)):
            valid = (group.position, sample) != INVALID
            k1 = of_sample(network, group, sample) - of_sample(other, group, sample)
            num_tokens += valid * len(k1)
            assert kl_PG[group.position][sample] == pytest.approx(valid * k1.sum().item(), abs=1e-9)
    assert mean == pytest.approx(sum(map(sum, kl_PG)) / num_tokens)


@pytest.mark.parametrize("form", ["exact", "rewritten"])
def test_the_replies_of_a_group_share_the_row_of_their_prompt(form):
    # One row per group: its common prompt once, then everything else of each conversation.
    groups, policy = make_groups(form), PlainPolicy(make_network())
    updater = updater_of(policy, 4096, variant="gspo")
    planned = updater._plan(updater._sequences([(groups[0], ADVANTAGES[0])]))
    [batch] = planned.micro_batches
    assert batch.input_ids_RL.shape[0] == 1
    assert batch.segment_RL.max() == (3 if form == "exact" else sum(NUM_REPLIES[0]))


def test_first_replies_alone_are_trained_where_that_is_asked_for():
    groups = make_groups("exact")
    updater = updater_of(PlainPolicy(make_network()), 4096)
    updater.train_on = "first_reply"
    sequences = updater._sequences([(groups[0], ADVANTAGES[0])])
    assert [(s.prompt_ids, s.response_ids, s.context) for s in sequences] == [
        (reply.prompt_ids, reply.token_ids, frozenset()) for reply in groups[0].replies_G
    ]


def test_a_loss_over_samples_is_refused_where_one_does_not_fit_and_others_cut_it():
    groups = make_groups("rewritten")
    longest = max(len(reply.ids) for group in groups for talks in group.conversations_GC for reply in talks[0].replies)
    update = lambda **loss: updater_of(PlainPolicy(make_network()), longest, **loss).update(groups, ADVANTAGES)  # noqa: E731
    update(variant="grpo")
    with pytest.raises(ValueError, match="max_tokens_per_micro_batch: .* is less than the sequences of one sample"):
        update(variant="gspo")


def test_a_mini_batch_without_advantage_makes_no_step_but_keeps_its_place():
    groups, policy = make_groups("exact"), PlainPolicy(make_network())
    metrics = updater_of(policy, 4096).update(groups, [[0.0] * 3, [0.0] * 3, *ADVANTAGES[2:]])
    assert metrics["update/optimizer_steps"] == len(policy.num_micro_batches) == policy.num_passed == 1
    before = [weight.clone() for weight in policy.network.parameters()]
    metrics = updater_of(policy, 4096).update(groups, [[0.0] * 3] * 4)
    assert metrics["update/optimizer_steps"] == 0 and policy.num_passed == 3 and "loss/policy" not in metrics
    assert all(map(torch.equal, before, policy.network.parameters()))


def test_a_batch_that_gets_one_update_is_computed_once():
    for mini_batch_prompts, num_frozen in ((4, 0), (2, 1)):  # old log-probs of the second mini-batch alone
        policy = PlainPolicy(make_network())
        updater = updater_of(policy, 4096)
        updater.mini_batch_prompts = mini_batch_prompts
        updater.update(make_groups("exact"), ADVANTAGES)
        assert policy.num_frozen == num_frozen


def test_inputs_are_left_as_they_were():
    groups = make_groups("rewritten")
    before = copy.deepcopy(groups)
    updater_of(PlainPolicy(make_network()), 4096).update(groups, ADVANTAGES)
    assert groups == before


def test_several_continuations_of_a_sample_are_refused():
    with pytest.raises(
        ValueError, match="rollout: train_on: all_replies .*continuations: 3.*set rollout.continuations: 1"
    ):
        load_config(QUICKSTART, ["rollout.train_on=all_replies", "rollout.continuations=3"])
    assert load_config(QUICKSTART, ["rollout.train_on=all_replies"]).rollout.train_on == "all_replies"


def test_the_longest_a_sample_trains_on_counts_the_replies_that_can_be():
    settings = {"user": {"kind": "scripted"}, "continuations": 1, "max_reply_tokens": 100, "max_later_reply_tokens": 30}
    count = lambda **more: RolloutSettings(**settings, **more).max_trained_tokens  # noqa: E731
    assert count(max_assistant_turns=3) == 100
    assert count(train_on="all_replies", max_assistant_turns=3, max_user_turns=2) == 100 + 2 * 30
    assert count(train_on="all_replies", max_assistant_turns=3, max_user_turns=1) == 100 + 30


def test_a_budget_that_may_not_hold_a_conversation_is_refused_before_anything_loads():
    config = load_config(QUICKSTART, ["rollout.train_on=all_replies", "update.max_tokens_per_micro_batch=768"])
    config.check_micro_batch(longest_prompt=20)  # the context is 768 tokens
    with pytest.raises(ValueError, match="max_tokens_per_micro_batch: 767 is less than a conversation .* 768 tokens"):
        load_config(
            QUICKSTART, ["rollout.train_on=all_replies", "update.max_tokens_per_micro_batch=767"]
        ).check_micro_batch(20)
    with pytest.raises(ValueError, match=r"2 contexts, since the loss averages over it\), 1536 tokens"):
        load_config(
            QUICKSTART,
            ["rollout.train_on=all_replies", "update.max_tokens_per_micro_batch=768", "loss.variant=gspo"],
        ).check_micro_batch(20)
