"""Groups without signal leave the step and others take their place, as often as asked."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from grpo.advantages import has_signal
from grpo.background import LoopThread
from grpo.collect import Collector, reward_matrices
from grpo.config import Config
from grpo.config_file import load_config
from rewards.scoring import Scorer, TooManyFailures
from rollout.conversation import Rollout
from rollout.data import batch_rows, spare_rows
from rollout.roles.simulator import ScriptedUser
from rollout.types import Scenario
from tests.groups import Alone
from tests.tiny import make_engine, make_model

NUM_SCENARIOS, PROMPTS = 12, 4


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = make_model(tmp_path_factory.mktemp("model"))
    chat, engine = make_engine(folder)
    yield folder, chat, engine
    engine.close()


def collect(engine, max_rounds, **rewards):
    folder, chat, shared = engine
    config = Config.model_validate(
        {
            "run": {"name": "x"},
            "model": {"path": folder},
            "data": {"train": "x.jsonl"},
            "rollout": {
                "prompts_per_step": PROMPTS, "group_size": 2, "continuations": 0, "max_reply_tokens": 40,
                "dynamic_sampling": {"max_rounds": max_rounds}, "user": {"kind": "scripted"},
            },
            "rewards": {"truncated": "score", "interactivity": {"by": "rubric"}, **rewards},
        }
    )  # fmt: skip
    scenarios = [
        Scenario(f"s/{row}", ({"role": "user", "content": "hello"},), "", "", "bees", "s", row)
        for row in range(NUM_SCENARIOS)
    ]
    scorer = Scorer(config.rewards, chat, None, max_reply_tokens=40)
    rollout = Rollout(config.rollout, shared, chat, ScriptedUser())
    ranks = Alone(0, 1, torch.device("cpu"))
    with LoopThread() as runner:
        batch = Collector(config, rollout, scorer, scenarios, {}, ranks, runner).collect(step=1)
    groups, replaced = batch.groups, batch.replaced
    assert [group.position for group in groups] == list(range(PROMPTS))
    signal_P = has_signal(*reward_matrices(groups))
    return [group.scenario.row for group in groups], signal_P.tolist(), [group.scenario.row for group in replaced]


def test_only_groups_without_signal_are_replaced_by_prompts_that_are_not_in_the_step(engine):
    # A random model hardly ever asks a worded question, so that nearly all groups earn 0 throughout.
    rows, signal, replaced = collect(engine, 0, weights={"interactivity": 1.0})
    assert rows == batch_rows(0, NUM_SCENARIOS, PROMPTS, 1) and not replaced and not all(signal)
    num_dull = signal.count(False)
    spare = spare_rows(1, NUM_SCENARIOS, rows, 1)
    refilled, _, replaced = collect(engine, 1, weights={"interactivity": 1.0})
    assert replaced == [row for row, kept in zip(rows, signal, strict=True) if not kept]
    assert [new for new, old in zip(refilled, rows, strict=True) if new != old] == spare[:num_dull]
    assert all(new == old for new, old, kept in zip(refilled, rows, signal, strict=True) if kept)


def test_refilling_ends_when_the_prompts_do(engine):
    # 8 spare prompts for 4 groups: whatever the rounds, no prompt comes twice.
    rows, signal, replaced = collect(engine, 99, weights={"interactivity": 1.0})
    assert len({*rows, *replaced}) == PROMPTS + len(replaced) <= NUM_SCENARIOS
    assert all(signal) or len(replaced) == NUM_SCENARIOS - PROMPTS


def test_steps_too_small_to_tell_add_up_and_the_first_failures_are_told_later():
    def group(*failures):
        return SimpleNamespace(conversations=[None] * 10, failures=[*failures])

    config = load_config(Path("configs/quickstart.yaml"), ["rewards.max_failure_rate=0.1"])
    rollout = SimpleNamespace(engine=SimpleNamespace(num_prompt_tokens=0, num_cached_tokens=0))
    collector = Collector(config, rollout, None, [], {}, Alone(0, 1, torch.device("cpu")), None)
    collector._check_failures([group("user: timeout", "user: timeout", "judge: cut")])  # 3 of 10: who knows
    with pytest.raises(TooManyFailures, match="3 of 20 .*\n  - user: timeout\n  - judge: cut\n"):
        collector._check_failures([group()])


def test_groups_with_signal_stay(engine):
    # Lengths differ, so that every group has signal.
    rows, signal, replaced = collect(engine, 3, weights={"token_amount": -1.0})
    assert all(signal) and not replaced and rows == batch_rows(0, NUM_SCENARIOS, PROMPTS, 1)
