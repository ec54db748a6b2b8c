"""Scores and how they combine, by numbers worked by hand."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest

from rewards.interactivity import rubric
from rewards.scoring import Scorer, check_failure_rate, combine, score_batch, soft_overlong
from rewards.settings import RewardSettings, SoftOverlongSettings, TokenAmountSettings
from rewards.tokens import token_amount
from rollout.chat import Chat
from rollout.types import Conversation, Reply, Scenario, Score

OPENING = 'Hi! I need some help with a short piece: "Keeping bees on a roof". I already know a few things I want in it.'


def conversation(*said, ended="turn_limit", finish_reason="stop", failure=None):
    """The assistant and the user take turns after the opening."""
    roles = ["assistant", "user"]
    messages = [{"role": "user", "content": OPENING}]
    messages += [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
    replies = tuple(Reply((1,), (2,), (0.0,), text, finish_reason) for text in said[::2])
    scenario = Scenario("test/0", (messages[0],), "goal", "task", "The hive is tied down.", "test", 0)
    return Conversation(scenario, 0, 0, tuple(messages), 1, replies, ended, failure=failure)


# ── interactivity ──


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("I can help. What would you like the bees to do on the roof?", 1.0),
        ("Lovely idea! How many bees are there? Is the roof in a city or a village?", 0.5),
        ("Would you tell me more about the bee hive?", 1.0),
        ("To begin with, which things about the bees should it mention?", 1.0),
        ("Happy to help. What do you want to say first?", 1.0),
        ("What tone do you want, e.g. funny or plain?", 1.0),
        ("What should it cover (the hive, the honey, the neighbours)?", 1.0),
        ("Should I mention Dr. Smith of the U.S. Lab?", 1.0),
        ("Who is it for?", 0.5),
        ("What is a bee hive made of?", 0.5),
        ("Welcome to your creative writing class! What brings you here today?", 0.5),
        ("Does rain fall in London tomorrow?", 0.25),
        ("Where is Hull?", 0.25),
        ("What should I say about the bees? How is the roof made? When did the bees come? Who else keeps bees there?", 0.5),
        ("Who? How long? Which details about the bees matter most to you?", 0.5),
        ("Have you wondered what bees do on a roof? Here is an article. " + "Bees hum all day long. " * 5, 0.5),
        ("Hello there! How can I help? What can I do for you today?", 0.0),
        ("Bees are insects. They live in hives.", 0.0),
        ("The bees are on a roof?", 0.0),
        ("This is a piece about bees on the roof?", 0.0),
        ("What bees what bees what?", 0.0),
        ("?", 0.0),
        ("Bees? Roof? Why?", 0.0),
        ("What do you want? What do you want? What do you want?", 0.0),
        ("What do you want to say about bees? What do you want to say about bees?", 0.0),
        ("zxq blorp fnord bees gleep roof?", 0.0),
        ('Can you help with the short piece "Keeping bees on a roof"?', 0.0),
        ('What should "Keeping bees on a roof" say, and who will read it?', 1.0),
        ("", 0.0),
    ],
)
def test_the_rubric_pays_for_what_a_person_would_call_a_good_question(reply, value):
    assert rubric(conversation(reply))[0] == value  # nobody answers: asking is all there is


TOLD = "Say that ratchet straps hold the hive eleven floors above Canal Street."
"""Nine content words: ratchet, straps, hold, hive, eleven, floors, above, canal, street."""
ASKED = "What should I say about the bees?"


@pytest.mark.parametrize(
    ("said", "value"),
    [
        ((ASKED, TOLD, "Ratchet straps hold the hive eleven floors above Canal Street."), 1.0),
        # Eight of nine are as good as all of them: four fifths are 7.2.
        ((ASKED, TOLD, "Ratchet straps hold the hive floors above Canal Street."), 1.0),
        ((ASKED, TOLD, "Ratchet straps hold the hive above a floor."), (1 + 6 / 9 / 0.8) / 2),
        ((ASKED, TOLD, "Lovely! Bees are insects."), 0.5),
        # Asking back about what was told is not using it.
        ((ASKED, TOLD, "Do ratchet straps hold the hive eleven floors above Canal Street?"), 0.5),
        # Nothing was asked, so nothing was told; a late question is worth half.
        (("Bees hum.", "Hmm, I am not sure this is it.", "Bees hum all day."), 0.0),
        (("Bees hum.", "Hmm, I am not sure this is it.", "What should I say about the bees next?"), 0.25),
        # Told without being asked, it can be used all the same.
        (("Bees hum.", TOLD, "Ratchet straps hold the hive eleven floors above Canal Street."), 0.5),
        # A question asked twice, or a text said twice, leaves a quarter of what the text is worth.
        ((ASKED, TOLD, "Ratchet straps hold the hive eleven floors above Canal Street. " + ASKED), (1 + 0.25) / 2),
        ((ASKED, TOLD, "Ratchet straps hold the hive eleven floors above Canal Street. " * 2), (1 + 0.25) / 2),
        # The last reply counts, with all that was told before it.
        ((ASKED, TOLD, "How is the hive made?", "Go on.", "Ratchet straps hold the hive above a floor."), (1 + 6 / 9 / 0.8) / 2),
    ],
)  # fmt: skip
def test_the_rubric_pays_for_asking_and_for_using_what_was_told(said, value):
    assert rubric(conversation(*said))[0] == pytest.approx(value)


def test_what_is_told_after_the_last_reply_need_not_be_used():
    talk = conversation(ASKED, TOLD, "Ratchet straps hold the hive eleven floors above Canal Street.", "Add honey jars.")
    assert rubric(talk)[0] == 1.0


def test_a_reply_that_was_cut_off_loses_a_quarter_and_its_answer():
    talk = conversation("What would you like of the bees? I think that", ended="length", finish_reason="length")
    assert rubric(talk)[0] == 0.75 / 2  # the user cannot answer, so nothing is used
    said = (ASKED, TOLD, "Ratchet straps hold the hive eleven floors above Canal Street, and")
    whole = conversation(*said)
    last = replace(whole.replies[1], finish_reason="length")
    cut = replace(whole, replies=(whole.replies[0], last), ended="length")
    assert (rubric(whole)[0], rubric(cut)[0]) == (1.0, (1 + 0.75) / 2)


def test_the_rubric_takes_the_topic_from_the_opening_that_the_reply_answers():
    talk = conversation("What would the trains carry?")
    opened = ({"role": "user", "content": "Tell me about trains."}, *talk.messages[1:])
    assert rubric(talk)[0] == 0.25
    assert rubric(replace(talk, messages=opened, num_prompt_messages=0))[0] == 0.5


# ── tokens ──


def test_tokens_are_thousands_of_assistant_tokens_after_the_prompt(small_model):
    chat = Chat.load(small_model)
    talk = conversation("one two", "a very long user message " * 50, "three")
    expected = (chat.num_tokens("one two") + chat.num_tokens("three")) / 1000
    assert token_amount(talk, chat.num_tokens, TokenAmountSettings()) == pytest.approx(expected)


def test_words_count_all_roles_after_the_prompt():
    talk = conversation("one two", "three four five", "six")
    assert token_amount(talk, len, TokenAmountSettings(count="words")) == 6


# ── combination ──


def score(**values):
    return Score(values, {}, {})


FAILED = Score({"bleu_score": 0.9}, {"interactivity": "judge: timeout"}, {})


def test_mean_then_weight_then_clamp_then_sum():
    scores = [
        score(bleu_score=0.2, interactivity=1.0, token_amount=30.0),
        score(bleu_score=0.6, interactivity=0.5, token_amount=10.0),
    ]
    reward = combine(scores, {"bleu_score": 1.0, "interactivity": 2.0, "token_amount": -0.1}, (-1.0, 1.0))
    assert reward.means == pytest.approx({"bleu_score": 0.4, "interactivity": 0.75, "token_amount": 20})
    assert reward.weighted == pytest.approx({"bleu_score": 0.4, "interactivity": 1.5, "token_amount": -2})
    assert reward.clamped == pytest.approx({"bleu_score": 0.4, "interactivity": 1, "token_amount": -1})
    assert reward.total == pytest.approx(0.4)


def test_without_a_clamp_the_weighted_means_are_summed():
    assert combine([score(token_amount=30.0)], {"token_amount": -0.1}, None).total == pytest.approx(-3)


def test_a_failed_judgement_is_left_out_and_never_a_zero():
    weights = {"bleu_score": 1.0, "interactivity": 1.0}
    good = score(bleu_score=0.4, interactivity=0.6)
    assert combine([good, FAILED], weights, None).total == pytest.approx(1.0)
    nothing = combine([FAILED, FAILED], weights, None)
    assert not nothing.valid and math.isnan(nothing.total)


SETTINGS = {
    "weights": {"bleu_score": 1.0, "interactivity": 1.0, "token_amount": -0.1},
    "bleu_score": {"extract": "last"},
    "interactivity": {"by": "rubric"},
}


def rewarded(chat, talk, **changes):
    scorer = Scorer(RewardSettings(**(SETTINGS | changes)), chat, judge=None, max_reply_tokens=8)
    scores = asyncio.run(score_batch(scorer, [talk]))
    return scores[0], scorer.reward([talk], scores)


def test_a_conversation_is_scored_by_its_parts(small_model):
    talk = conversation("What should I say about the bees?", "That the hive is tied down.", "The hive is tied down.")
    result, reward = rewarded(Chat.load(small_model), talk)
    assert result.values["bleu_score"] == pytest.approx(1) and result.values["interactivity"] == 1
    assert reward.total == pytest.approx(2 - 0.1 * result.values["token_amount"])


@pytest.mark.parametrize(("truncated", "total"), [(0.0, 0.0), (-0.5, -0.5), ("mask", None)])
def test_a_cut_first_reply_gets_what_the_setting_says(small_model, truncated, total):
    talk = conversation("The hive is tied", ended="length", finish_reason="length")
    _, reward = rewarded(Chat.load(small_model), talk, truncated=truncated)
    assert reward.valid == (total is not None)
    assert reward.total == total or math.isnan(reward.total)


def test_a_cut_first_reply_may_be_scored_as_it_is(small_model):
    talk = conversation("The hive is tied down.", ended="length", finish_reason="length")
    _, reward = rewarded(Chat.load(small_model), talk, truncated="score")
    assert reward.means["bleu_score"] == pytest.approx(1)


@pytest.mark.parametrize(("num_tokens", "penalty"), [(79, 0.0), (80, 0.0), (90, 0.5), (100, 1.0)])
def test_the_overlong_penalty_grows_over_the_last_part_of_the_limit(num_tokens, penalty):
    settings = SoftOverlongSettings(buffer=0.2, penalty=1.0)
    assert soft_overlong(num_tokens, 100, settings) == pytest.approx(penalty)


def test_the_overlong_penalty_is_taken_from_the_total(small_model):
    # The reply of `conversation` has one token, half of the limit of two, over which the penalty grows.
    talk, settings = conversation("The hive is tied down."), SETTINGS | {"truncated": "score"}
    settings |= {"soft_overlong": {"buffer": 1.0, "penalty": 3}}
    scorer = Scorer(RewardSettings(**settings), Chat.load(small_model), judge=None, max_reply_tokens=2)
    scores = asyncio.run(score_batch(scorer, [talk]))
    reward = scorer.reward([talk], scores)
    assert reward.overlong == 1.5 and reward.total == pytest.approx(sum(reward.clamped.values()) - 1.5)


def test_a_failed_simulator_makes_the_conversation_invalid(small_model):
    talk = conversation("What about bees?", ended="simulator_failed", failure="user: timeout")
    result, reward = rewarded(Chat.load(small_model), talk)
    assert result.failures == {"user": "user: timeout"} and not result.values and not reward.valid


def test_too_many_failures_stop_the_run_with_the_first_three():
    failures = [f"judge: fault {i}" for i in range(5)]
    check_failure_rate(5, 19, failures, 0.1)  # too few started to tell
    check_failure_rate(2, 20, failures, 0.1)
    with pytest.raises(RuntimeError) as error:
        check_failure_rate(5, 20, failures, 0.1)
    assert "5 of 20" in str(error.value) and "fault 2" in str(error.value) and "fault 3" not in str(error.value)
