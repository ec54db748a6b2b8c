"""A deterministic stand-in for the judge's interactivity: does the first reply ask a good question?

A person would call a question good when it is put in words, is about what they want, and comes alone
or with one other. So a bare question mark earns nothing, nor does a question that any topic would
fit only partly.
"""

from __future__ import annotations

import re

from rollout.types import Conversation, Scenario

_SENTENCE = re.compile(r"[^.!?\n]*[.!?]|[^.!?\n]+")
_WORD = re.compile(r"[a-z]+(?:'[a-z]+)?")
_ASKING = frozenset(
    "what which who whom whose when where why how do does did is are was were can could would will should shall "
    "have has may".split()
)
_COMMON = frozenset(
    "a about already an and are article as at be by can could do few for from have hello help hi i in is it know like "
    "me mind my need of on or piece please short some text that the them things this to us want was we what which with "
    "would write writing you your".split()
)
MIN_WORDS, MAX_WORDS, MAX_QUESTIONS = 4, 40, 2
UNFINISHED = 0.75
"""Factor on a reply that was cut off: its reader has to guess the rest."""


def rubric(conversation: Conversation) -> tuple[float, dict[str, object]]:
    """A value in [0, 1] and what it counted, from the conversation's first reply.

    - 0: no question in words (4 to 40 words, with a question word or auxiliary among the first), or the
      same question over again.
    - 1: one or two such questions, at least one of which is about the topic: it shares a content word
      with the user's opening, or asks the user about "you" or "your" and the piece they want.
    - 0.75: as 1, but none about the topic though addressed to the user.
    - 0.5: more than two questions, or none that is about the topic or addressed to the user.

    A reply that its token limit cut off gets three quarters of that.
    """
    questions = [words for words in map(_words, _questions(conversation.first_reply.text)) if _is_worded(words)]
    distinct = {tuple(words) for words in questions}
    topic = content_words(conversation.scenario)
    on_topic = sum(bool(topic & set(words)) for words in distinct)
    to_user = sum(bool({"you", "your"} & set(words)) for words in distinct)
    if not distinct or len(distinct) < len(questions):
        value = 0.0
    elif len(distinct) > MAX_QUESTIONS or not (on_topic or to_user):
        value = 0.5
    else:
        value = 1.0 if on_topic else 0.75
    if conversation.first_reply.finish_reason == "length":
        value *= UNFINISHED
    return value, {"questions": len(questions), "on_topic": on_topic, "to_user": to_user}


def content_words(scenario: Scenario) -> frozenset[str]:
    """What the user's opening is about: its words without the common ones."""
    return frozenset(_words(scenario.messages[-1]["content"])) - _COMMON


def _questions(text: str) -> list[str]:
    return [sentence for sentence in _SENTENCE.findall(text) if sentence.endswith("?")]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _is_worded(words: list[str]) -> bool:
    return MIN_WORDS <= len(words) <= MAX_WORDS and any(word in _ASKING for word in words[:8])
