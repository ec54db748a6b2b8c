"""What evaluations change in a conversation: how many messages, who opens, under which system prompt."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from grpo.config import EvaluationSettings
from grpo.config_file import load_config
from grpo.evidence.evaluate import evaluate
from launch.train import check_inputs
from rewards.scoring import Scorer
from rewards.settings import RewardSettings
from rollout.conversation import Rollout, RolloutPlan
from rollout.data import with_system_prompt
from rollout.roles.client import LLMClient, LLMError
from rollout.roles.prompting import SYSTEM_PROMPTS, system_prompt
from rollout.roles.simulator import STOP_SIGNAL, LLMUser, ScriptedUser, UserTurn
from rollout.settings import EndpointSettings, RolloutSettings, UserSettings
from rollout.types import Scenario
from tests.fake_endpoint import MODEL, FakeEndpoint, says
from tests.fake_engine import words_engine
from tests.groups import Alone


def scenario(number=0, words="hello"):
    return Scenario(f"s/{number}", ({"role": "user", "content": words},), f"goal {number}", "", None, "s", number)


def converse(user, scenarios=(scenario(),), *, answer=lambda prompt, seed: ["help"], **plan):
    """One conversation per scenario, with limits of one user turn and two replies unless `plan` says otherwise."""
    chat, engine = words_engine(answer)
    settings = RolloutSettings(user={"kind": "scripted"}, max_user_turns=1, max_assistant_turns=2)
    plan = RolloutPlan(**{"group_size": 1, "continuations": 1, "temperature": 0.0, "run_seed": 1, "step": -1} | plan)
    played = asyncio.run(Rollout(settings, engine, chat, user).play(scenarios, plan, lambda talk: None))
    engine.close()
    return [talk for [[talk]] in played]


@dataclass
class Patient:
    """A user that says one and the same for ever, and remembers what it was asked with."""

    turn: UserTurn | LLMError = UserTurn("i want bees", satisfied=False)
    heard: list[list[str]] = field(default_factory=list)

    async def answer(self, scenario, messages):
        self.heard.append([message["content"] for message in messages])
        if isinstance(self.turn, LLMError):
            raise self.turn
        return self.turn


@pytest.mark.parametrize(
    ("limits", "roles"),
    [
        ({}, "aua"),
        ({"max_new_turns": 2}, "a"),
        ({"max_new_turns": 5}, "auaua"),
        ({"max_new_turns": 14}, "au" * 6 + "a"),  # a fourteenth would be a user's that nobody answers
        ({"max_new_turns": 14, "user_opens": True}, "ua" * 7),
        ({"max_new_turns": 3, "user_opens": True}, "ua"),
        ({"user_opens": True}, "ua"),  # the opening is a user turn
    ],
)
def test_new_turns_count_the_messages_of_both_sides_and_end_on_the_assistant(limits, roles):
    [talk] = converse(Patient(), **limits)
    assert "".join(message["role"][0] for message in talk.new_messages) == roles
    assert talk.ended == "turn_limit" and len(talk.replies) == roles.count("a")


def with_system(words="hello"):
    system = {"role": "system", "content": "do help"}
    return replace(scenario(), messages=(system, {"role": "user", "content": words}), reference="bees hum .")


def test_a_user_that_opens_is_asked_with_the_system_message_alone():
    user = Patient()
    [talk] = converse(user, [with_system()], max_new_turns=4, user_opens=True)
    assert user.heard == [["do help"], ["do help", "i want bees", "help"]]
    assert [message["content"] for message in talk.messages] == [
        "do help",
        "i want bees",
        "help",
        "i want bees",
        "help",
    ]
    assert talk.num_prompt_messages == 1 and talk.new_messages[0]["role"] == "user"


def test_an_evaluation_from_an_empty_history_is_played_to_its_limit_and_scored():
    chat, engine = words_engine(lambda prompt, seed: ["help"])
    scorer = Scorer(RewardSettings(weights={"token_amount": 1.0}), chat, None, max_reply_tokens=40)
    rollout = Rollout(RolloutSettings(user={"kind": "scripted"}), engine, chat, Patient())
    settings = EvaluationSettings(user_opens=True, max_new_turns=6)
    evaluation = asyncio.run(
        evaluate(rollout, scorer, [with_system()], settings, step=3, seed=1, ranks=Alone(0, 1, torch.device("cpu")))
    )
    engine.close()
    [row] = evaluation.rows
    assert [message["role"] for message in row["messages"]] == ["system"] + ["user", "assistant"] * 3
    assert row["num_prompt_messages"] == 1 and row["ended"] == "turn_limit"
    assert evaluation.reward == row["reward"]["total"] == pytest.approx(0.003)  # three words


def test_a_scripted_user_opens_with_the_prompts_own_words():
    [talk] = converse(ScriptedUser(), [with_system("what about the roof ?")], max_new_turns=4, user_opens=True)
    assert talk.messages[1]["content"] == "what about the roof ?"
    assert talk.messages[3]["content"] in ScriptedUser.NUDGES


def llm_user(endpoint):
    server = EndpointSettings(base_url=endpoint.base_url, model=MODEL)
    return LLMUser(LLMClient("user", server), UserSettings(endpoint=server))


def test_a_simulated_user_is_told_that_the_chat_is_empty_and_its_stop_signal_is_never_in_the_text():
    answers = [{"current_answer": "", "thought": "", "reply": text} for text in ("hello i", f"keep it {STOP_SIGNAL}")]
    with FakeEndpoint(*map(says, answers)) as endpoint:
        [talk] = converse(llm_user(endpoint), [with_system()], max_new_turns=9, user_opens=True)
        asked = [request["messages"][0]["content"] for request in endpoint.requests]
    assert "<chat>\n[]\n</chat>" in asked[0] and "where it is empty, this person opens" in asked[0]
    assert [message["content"] for message in talk.messages] == ["do help", "hello i", "help"]
    assert talk.ended == "user_satisfied" and talk.farewell == "keep it"


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        (LLMError("user", "timeout", "no answer"), "timeout"),
        (UserTurn("bye", satisfied=True), "ended the chat instead of opening it"),
        (UserTurn("bees " * 200, satisfied=False), "opening fills the whole context"),
    ],
)
def test_an_opening_that_fails_is_a_failed_conversation_without_a_score(turn, reason):
    chat, engine = words_engine(lambda prompt, seed: ["help"], max_context_tokens=160)
    settings = RolloutSettings(user={"kind": "scripted"})
    scorer = Scorer(RewardSettings(weights={"token_amount": 1.0}), chat, None, max_reply_tokens=40)
    evaluation = asyncio.run(
        evaluate(
            Rollout(settings, engine, chat, Patient(turn)),
            scorer,
            [with_system()],
            EvaluationSettings(user_opens=True),
            step=3,
            seed=1,
            ranks=Alone(0, 1, torch.device("cpu")),
        )
    )
    engine.close()
    [row] = evaluation.rows
    assert row["ended"] == "simulator_failed" and reason in row["score"]["failures"]["user"]
    assert row["reward"]["total"] is None and row["reply_tokens"] == [] and not row["first_reply_cut"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["evaluation.max_new_turns=4", "evaluation.continuations=0"], "evaluation: continuations: 0 ends every"),
        (["evaluation.user_opens=true", "rollout.max_user_turns=0"], "evaluation.user_opens: true .* allows none"),
        (["evaluation.max_new_turns=1"], "evaluation.max_new_turns: 1 will not do"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        load_config(Path("configs/quickstart.yaml"), settings)


def test_a_system_prompt_stands_before_every_prompt(tmp_path):
    (tmp_path / "mine.txt").write_text(" ask first \n")
    assert system_prompt(str(tmp_path / "mine.txt")) == "ask first"
    assert system_prompt("proactive") == SYSTEM_PROMPTS["proactive"].read_text().strip()
    rows = with_system_prompt([scenario(0), scenario(1, "bees")], "ask first")
    assert [[m["content"] for m in row.messages] for row in rows] == [["ask first", "hello"], ["ask first", "bees"]]
    [talk] = converse(Patient(), rows[:1], user_opens=True)
    assert talk.messages[0] == {"role": "system", "content": "ask first"}


def test_a_system_prompt_takes_the_place_of_the_prompts_own(tmp_path, small_model, capsys):
    for text, messages in (("ask first", ["ask first", "hello"]), (system_prompt("none"), ["hello"])):
        for rows in (with_system_prompt([with_system()], text), with_system_prompt([scenario()], text)):
            assert [message["content"] for message in rows[0].messages] == messages
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        json.dumps(
            {"prompt": [{"role": "system", "content": "own"}, {"role": "user", "content": "x"}], "reference": "y"}
        )
        + '\n{"prompt": "x", "reference": "y"}\n'
    )
    settings = [f"model.path={small_model}", f"run.folder={tmp_path}", f"data.train={rows}", "data.validation=null"]
    inputs = check_inputs(load_config(Path("configs/quickstart.yaml"), [*settings, "rollout.system_prompt=none"]))
    assert [len(row.messages) for row in inputs.train] == [1, 1]
    assert "takes the place of the system messages of 1 prompts" in capsys.readouterr().out


def test_a_system_prompt_whose_file_will_not_do_is_refused(tmp_path):
    with pytest.raises(ValueError, match="rollout.system_prompt: cannot read .*gone.txt.* one of: proactive, none"):
        system_prompt(str(tmp_path / "gone.txt"))
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(ValueError, match="rollout.system_prompt: .*empty.txt is empty"):
        system_prompt(str(tmp_path / "empty.txt"))


def test_the_check_of_prompt_lengths_counts_the_system_prompt(tmp_path, small_model):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "x", "reference": "y"}\n' * 2)
    settings = [
        f"model.path={small_model}", f"run.folder={tmp_path}", f"data.train={rows}", "data.validation=null",
        "data.max_prompt_tokens=100",
    ]  # fmt: skip
    check_inputs(load_config(Path("configs/quickstart.yaml"), settings))
    with pytest.raises(ValueError, match="rows.jsonl, row 0: the prompt has [0-9]+ tokens, the limit is 100"):
        check_inputs(load_config(Path("configs/quickstart.yaml"), [*settings, "rollout.system_prompt=proactive"]))


def test_the_start_of_a_run_tells_what_all_replies_are_trained_as(tmp_path, small_model, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "x", "reference": "y"}\n' * 2)
    settings = [f"run.folder={tmp_path}", f"data.train={rows}", "data.validation=null", "rollout.train_on=all_replies"]
    check_inputs(load_config(Path("configs/quickstart.yaml"), [f"model.path={small_model}", *settings]))
    assert "trained: all replies, one sequence per conversation" in capsys.readouterr().out
