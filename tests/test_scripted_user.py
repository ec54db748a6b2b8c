"""The simulated user without a model: what it tells, and when."""

from __future__ import annotations

import asyncio

import pytest

from rollout.roles.simulator import ScriptedUser, UserTurn, asks_something
from rollout.types import Message, Scenario

OPENING = {"role": "user", "content": "Can you help me write about tea?"}
REFERENCE = "Tea is old. It came from China!\nDrink it hot. With milk?"


def scenario_of(reference: str | None = REFERENCE, goal: str = "Write about tea.") -> Scenario:
    return Scenario("s0", (OPENING,), goal, "writing an article", reference, "test", 0)


def answer(scenario: Scenario, *said: str) -> UserTurn:
    """To the chat in which assistant and user said this, by turns."""
    roles = ("assistant", "user")
    chat: list[Message] = [OPENING, *({"role": roles[i % 2], "content": text} for i, text in enumerate(said))]
    return asyncio.run(ScriptedUser().answer(scenario, chat))


def test_it_tells_the_next_three_sentences_only_when_asked():
    first = answer(scenario_of(), "What should it say?")
    assert first == UserTurn(
        'Good question. Here is what it should say: "Tea is old. It came from China! Drink it hot." '
        "Please write out the finished piece in these words.",
        satisfied=False,
    )
    nudge = answer(scenario_of(), "Here is an essay.")
    assert nudge.text in ScriptedUser.NUDGES and not nudge.satisfied
    assert ': "With milk?" ' in answer(scenario_of(), "What should it say?", first.text, "What else?").text


def test_it_ends_the_chat_when_all_is_said():
    said = ["What is it about?"]
    for _ in range(2):
        turn = answer(scenario_of(), *said)
        assert not turn.satisfied
        said += [turn.text, "And then?"]
    assert answer(scenario_of(), *said) == UserTurn(ScriptedUser.FAREWELL, satisfied=True)


def test_it_wants_the_goals_sentences_where_there_is_no_reference():
    for reference in (None, "", " … "):
        turn = answer(scenario_of(reference, goal="Say {that} costs $5. Then stop."), "What do you want?")
        assert ': "Say {that} costs $5. Then stop." ' in turn.text


def test_with_nothing_to_want_it_ends_the_chat():
    assert answer(scenario_of(None, goal=""), "Yes?").satisfied


def test_it_is_deterministic_and_varies_with_the_turn():
    chats = [["Hm."] + ["Go on.", "Hm."] * turn for turn in range(3)]
    nudges = [answer(scenario_of(), *said).text for said in chats]
    assert nudges == [answer(scenario_of(), *said).text for said in chats]
    assert nudges == list(ScriptedUser.NUDGES)


@pytest.mark.parametrize(
    "text",
    ["What tone?", "For whom?\nI can start.", '**Which "one"?**', "(Ready?)", "几点？好"],
)
def test_a_sentence_that_ends_in_a_question_mark_asks(text: str):
    assert asks_something(text)


@pytest.mark.parametrize("text", ["", "Here it is.", "See http://x.org/?q=1 for more.", "x = a ? b : c", "What a day!"])
def test_other_text_asks_nothing(text: str):
    assert not asks_something(text)
