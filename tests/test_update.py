"""The update against plain torch, and on several ranks under every ZeRO stage against one rank."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from grpo.config_file import load_config
from grpo.groups import Group
from grpo.run.model_writer import ModelWriter
from grpo.trainer import Trainer
from rewards.scoring import ReplyReward
from tests.groups import Alone
from tests.programs import update_program as program
from tests.tiny import make_model
from tests.torchrun import torchrun


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def read(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict(), json.loads((folder / "metrics.json").read_text())


def test_the_kl_is_taken_from_the_reward_before_replies_are_compared():
    groups = [
        Group(None, position, ((),) * 2, ((),) * 2, tuple(ReplyReward(r, True, {}, {}, {}) for r in rewards))
        for position, rewards in enumerate(((1.0, 0.0), (1.0, 1.0)))
    ]
    config = load_config(
        Path("configs/quickstart.yaml"), ["loss.kl_coef=0.1", "loss.kl_placement=in_reward", "advantage.scale=none"]
    )
    trainer = SimpleNamespace(
        config=config,
        updater=SimpleNamespace(reply_kl=lambda groups: ([[1.0, 3.0], [1.0, 3.0]], 0.25)),
    )
    advantages, kl, mean = Trainer.advantages(trainer, groups)
    # 1 - 0.1 and 0 - 0.3: 0.6 on both sides of their mean. Rewards that are equal stay no signal, whatever the KL.
    assert advantages[0] == pytest.approx([0.6, -0.6]) and advantages[1] == [0.0, 0.0]
    assert kl == [[1.0, 3.0], [1.0, 3.0]] and mean == 0.25


@pytest.fixture(scope="module")
def one_rank(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    cases = ["0/float32", "0/bfloat16"]
    torchrun(1, "tests.programs.update_program", model, folder, *cases)
    return {case: read(folder / case) for case in cases}


@pytest.fixture(scope="module")
def two_ranks(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    cases = [f"{stage}/{dtype}" for stage in range(4) for dtype in ("float32", "bfloat16")]
    cases += ["3/float32/checkpointed", "3/bfloat16/checkpointed"]
    torchrun(2, "tests.programs.update_program", model, folder, *cases)
    return {case: read(folder / case) for case in cases}


def in_plain_torch(model):
    """The same two updates written out: whole logits, one sequence at a time, torch's AdamW."""
    load = lambda: AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)  # noqa: E731
    policy, reference = load(), load()
    matrices = [p for p in policy.parameters() if p.ndim > 1]
    vectors = [p for p in policy.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)
    replies = program.fixed_replies()

    def table(network, reply):
        logits = network(torch.tensor([reply.prompt_ids + reply.token_ids])).logits[0] / 0.8
        return logits.log_softmax(-1)[len(reply.prompt_ids) - 1 : -1]

    def logprobs(network, reply):
        return table(network, reply)[range(len(reply.token_ids)), list(reply.token_ids)]

    for _ in range(program.STEPS):
        with torch.no_grad():
            old = {(p, g): logprobs(policy, replies[p][g]) for p in range(program.NUM_PROMPTS) for g in range(3)}
        for positions in ((0, 1), (2, 3), (4, 5)):
            members = [(p, g) for p in positions for g in range(3) if program.is_valid(p, g)]
            num_tokens = sum(len(replies[p][g].token_ids) for p, g in members)
            total = 0.0
            for p, g in members:
                every, advantage = table(policy, replies[p][g]), program.ADVANTAGES[p][g]
                now, entropy = (
                    every.gather(1, torch.tensor(replies[p][g].token_ids)[:, None])[:, 0],
                    -(every.exp() * every).sum(1),
                )
                with torch.no_grad():
                    ref = logprobs(reference, replies[p][g])
                ratio = (now - old[p, g]).exp()
                loss = torch.maximum(-ratio * advantage, -ratio.clamp(0.8, 1.2) * advantage)
                if advantage < 0:
                    loss = loss.clamp(max=-3.0 * advantage)
                kl = (ref - now).exp() - (ref - now) - 1
                total = total + (loss + 0.1 * kl - 0.02 * entropy).sum() / num_tokens
            optimizer.zero_grad()
            total.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()
    return policy.state_dict()


def distance(one, other):
    """Largest difference between two states, relative to the largest weight."""
    assert one.keys() == other.keys()
    return max(
        ((one[name].float() - other[name].float()).abs().max() / one[name].float().abs().max()).item() for name in one
    )


def test_a_generation_config_stays_what_it_is_even_none_or_one_that_transformers_would_not_write(model, tmp_path):
    odd = {"eos_token_id": 1, "temperature": 0.6, "top_p": 0.9}  # without do_sample, as some folders have it
    for name, text in (("odd", json.dumps(odd)), ("none", None)):
        shutil.copytree(model, tmp_path / name)
        file = tmp_path / name / "generation_config.json"
        file.unlink() if text is None else file.write_text(text)
        policy = SimpleNamespace(
            ranks=Alone(0, 1, torch.device("cpu")),
            causal_lm=AutoModelForCausalLM.from_pretrained(tmp_path / name),
            state_on_main=lambda: None,
        )
        policy.causal_lm.generation_config = GenerationConfig()  # as Policy does
        ModelWriter(policy, tmp_path / name).save(tmp_path / "saved")
        saved = tmp_path / "saved" / "generation_config.json"
        assert (saved.read_text() if saved.exists() else None) == text


def test_one_rank_ends_at_the_weights_of_plain_torch(model, one_rank):
    state, metrics = one_rank["0/float32"]
    assert distance(state, in_plain_torch(model)) < 1e-4
    assert distance(state, AutoModelForCausalLM.from_pretrained(model).state_dict()) > 1e-2  # and it did move
    assert [m["update/optimizer_steps"] for m in metrics] == [3, 3]


@pytest.mark.parametrize("case", [*(f"{stage}/float32" for stage in range(4)), "3/float32/checkpointed"])
def test_two_ranks_end_at_the_weights_of_one(one_rank, two_ranks, case):
    (state, metrics), (state_of_one, metrics_of_one) = two_ranks[case], one_rank["0/float32"]
    assert distance(state, state_of_one) < 1e-4
    for one, two in zip(metrics_of_one, metrics, strict=True):
        assert two == pytest.approx(one, rel=1e-3, abs=1e-6)


def test_a_head_of_its_own_is_trained_where_it_is_sharded(tmp_path):
    model = make_model(tmp_path / "model", tied=False)
    torchrun(2, "tests.programs.update_program", model, tmp_path, "3/float32")
    state, _ = read(tmp_path / "3/float32")
    assert distance(state, in_plain_torch(model)) < 1e-4
    assert not state["lm_head.weight"].equal(state["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    "ranks, case",
    [(1, "0/bfloat16"), *((2, f"{stage}/bfloat16") for stage in range(4)), (2, "3/bfloat16/checkpointed")],
)
def test_bfloat16_trains_in_the_same_direction_and_as_far(model, one_rank, two_ranks, ranks, case):
    state, metrics = {1: one_rank, 2: two_ranks}[ranks][case]
    assert next(iter(state.values())).dtype == torch.bfloat16
    start = AutoModelForCausalLM.from_pretrained(model).state_dict()
    exact = one_rank["0/float32"][0]
    moves = [torch.cat([(s[n].float() - start[n]).flatten() for n in start]) for s in (state, exact)]
    assert torch.nn.functional.cosine_similarity(*moves, dim=0) > 0.7
    assert moves[0].norm() / moves[1].norm() == pytest.approx(1, abs=0.1)
    assert all(math.isfinite(value) for m in metrics for value in m.values())


def test_a_gradient_that_is_not_finite_changes_nothing_and_three_in_a_row_stop_the_run(model, tmp_path):
    cases = [f"{stage}/{dtype}" for stage in range(4) for dtype in ("float32", "bfloat16")]
    torchrun(2, "tests.programs.not_finite_program", model, tmp_path / "results.json", *cases)
    for case, shares in json.loads((tmp_path / "results.json").read_text()).items():
        for results in shares:
            assert results["kept"] and results["moved"], case
            first, good, *rest = results["norms"]
            assert not math.isfinite(float(first)) and math.isfinite(float(good)), case
            assert len(rest) == 2 and "three optimizer steps in a row" in results["error"], case
