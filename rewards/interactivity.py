"""A deterministic stand-in for the judge's interactivity: does the assistant ask, and then use what it is told?

A person calls a question good when it is put in words, is about what they want, comes alone or with one
other, and is followed by silence: who asks and then writes on has not asked. A bare question mark earns
nothing, and neither does asking again what was just answered. It reads English; in other languages use the
judge (`by: llm`).
"""

from __future__ import annotations

import re

from rollout.simulator import asks_something
from rollout.types import Conversation, Reply

_BOUNDARY = re.compile(
    r"(?<!\bMr\.)(?<!\bMrs\.)(?<!\bMs\.)(?<!\bDr\.)(?<![A-Z]\.)(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[]*[A-Z0-9])|\n+"
)
_CLAUSE = re.compile(r"[,:;]\s+|\s+[-\u2013\u2014]\s+")
_WORD = re.compile(r"[^\W\d_]+(?:['\u2019][^\W\d_]+)?")
_OFFER = re.compile(r"\b(?:can|could|may|should) (?:i|we) (?:help|assist|do)\b", re.IGNORECASE)
_ASKING = frozenset(
    "what what's which who who's whom whose when where why how do does did don't is isn't are aren't was were can "
    "can't could would wouldn't will should shall have has may might am".split()
)
_LEADING = frozenset("and but or so then also first second finally if".split())
_READER = frozenset("you your yours we us".split())
_PIECE = frozenset("it piece article text story post draft i".split())
_COMMON = frozenset(
    "a about after again ah all already also am an and any are as at be because been before being but by can could did do "
    "does doing few for from get glad give go good had has have hello help her here him his how i i'd i'm if in into is it "
    "its just know let like look make me might mind more most much my need new no not now of on one only or other our "
    "out over own people piece please question quite really right say see share short should so some something story sure take tell text than "
    "that the their them then there these they thing things think this those to too up us use very want was way we "
    "were what when where which while who why will with work would write writing yes you your hi article draft".split()
)
MIN_WORDS, MAX_WORDS, MAX_QUESTIONS, MAX_WORDS_AFTER = 3, 40, 2, 15
ECHO_RUN = 3
"""Words in a row that make a quotation of the user."""
UNFINISHED = 0.75
"""Factor on a reply that was cut off: its reader has to guess the rest."""
LATE = 0.5
"""Factor on a question that the first reply should have asked."""
MIN_TOLD, ALL_TOLD = 3, 0.8
"""Content words that make a message tell something; the share of them that a reply need take up."""


def rubric(conversation: Conversation) -> tuple[float, dict[str, object]]:
    """A value in [0, 1] and what it counted: the mean of how well the assistant asked and how well it used the answers.

    Asking is the value of the first reply's question (`question_value`), or half of a later reply's where the first
    asked nothing. Using is the share of what the user told that the last reply takes up (`_used`), 0 where the user
    told nothing. Using is halved where a reply repeats a question of an earlier one. Where nobody came to answer the
    first reply, as with `rollout.continuations: 0`, asking alone counts.
    """
    first = conversation.first_reply
    opening = _words(conversation.opening)
    asks, counted = question_value(first, opening)
    if len(conversation.replies) == 1 and not first.cut:
        return asks, counted
    later = conversation.replies[1:]
    if not asks:
        asks = LATE * max((question_value(reply, opening)[0] for reply in later), default=0.0)
    uses, again = _used(conversation, opening), _asks_again(conversation)
    return (asks + (0.5 * uses if again else uses)) / 2, counted | {"asks": asks, "uses": uses, "asks_again": again}


def question_value(reply: Reply, opening: list[str]) -> tuple[float, dict[str, object]]:
    """How good the reply's question is, in [0, 1], and what was counted; `opening` are the words it answers.

    A question counts as worded where it has 3 to 40 words, not the same few over again and less than half of them
    quoted from the user's opening (three in a row or more), and begins, or goes on after a comma, with a question
    word or an auxiliary. An offer ("How can I help?") asks nothing. The best worded question decides:

    - 1: about the topic: it shares the stem of a content word with the user's opening;
    - else 0.25, and 0.25 more where it is addressed to the user ("you", "your") or about the piece ("it", "the
      article"), and 0.25 more where it has substance: two content words or more;
    - 0: there is none, or one is asked twice.

    More than two questions of any kind make it 0.5 at most. Halved where more than 15 words follow the last
    question; three quarters where the token limit cut the reply off.
    """
    sentences = _sentences(reply.text)
    asked = [number for number, sentence in enumerate(sentences) if asks_something(sentence)]
    worded = [
        _words(sentences[number])
        for number in asked
        if _is_worded(sentences[number])
        and not _OFFER.search(sentences[number])
        and not _echoes(_words(sentences[number]), opening)
    ]
    topic = _content_stems(opening)
    on_topic = sum(bool(topic & set(map(_stem, words))) for words in worded)
    if not worded or len(set(map(tuple, worded))) < len(worded):
        value = 0.0
    else:
        value = 1.0 if on_topic else 0.25 + 0.25 * max(map(_merits, worded))
    if len(asked) > MAX_QUESTIONS:
        value = min(value, 0.5)
    if asked and sum(len(_words(sentence)) for sentence in sentences[asked[-1] + 1 :]) > MAX_WORDS_AFTER:
        value *= 0.5
    if reply.cut:
        value *= UNFINISHED
    return value, {"questions": len(asked), "worded": len(worded), "on_topic": on_topic}


def _used(conversation: Conversation, opening: list[str]) -> float:
    """How much of what the user told stands in the last reply, in [0, 1]: of content words, by stem.

    A question does not count, so that asking back about what was told is not using it. Four fifths are all of it: a
    text need not hold every word. Three quarters where the token limit cut the reply off.
    """
    before = conversation.new_messages[: _last_reply(conversation)]
    told = [_content_stems(_words(said["content"])) for said in before if said["role"] == "user"]
    told = frozenset().union(*told) - _content_stems(opening)
    if len(told) < MIN_TOLD:
        return 0.0
    last = conversation.replies[-1]
    stated = [sentence for sentence in _sentences(last.text) if not asks_something(sentence)]
    share = len(told & _content_stems(_words(" ".join(stated)))) / len(told)
    return min(1.0, share / ALL_TOLD) * (UNFINISHED if last.cut else 1.0)


def _last_reply(conversation: Conversation) -> int:
    """Its place among the new messages."""
    roles = [message["role"] for message in conversation.new_messages]
    return len(roles) - 1 - roles[::-1].index("assistant")


def _asks_again(conversation: Conversation) -> bool:
    """Whether a reply repeats a question of an earlier one: word for word, or half of it in runs of three."""
    earlier: list[list[str]] = []
    for reply in conversation.replies:
        questions = [_words(sentence) for sentence in _sentences(reply.text) if asks_something(sentence)]
        if any(words and _echoes(words, old) for words in questions for old in earlier):
            return True
        earlier += questions
    return False


def _merits(words: list[str]) -> int:
    """0 to 2: is it addressed to the user or about the piece, and has it substance?"""
    return bool((_READER | _PIECE) & set(words)) + (len(set(words) - _COMMON) >= 2)


def _content_stems(words: list[str]) -> frozenset[str]:
    """What the words are about: the stems of all but the common ones."""
    return frozenset(map(_stem, set(words) - _COMMON))


def _sentences(text: str) -> list[str]:
    return [sentence for sentence in _BOUNDARY.split(text) if sentence]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _stem(word: str) -> str:
    """The first five letters: bee/bees, keep/keeping, and close enough for a stand-in."""
    word = re.split("['\u2019]", word)[0]
    return (word[:-1] if len(word) > 3 and word.endswith("s") else word)[:5]


def _is_worded(question: str) -> bool:
    words = _words(question)
    if not MIN_WORDS <= len(words) <= MAX_WORDS or len(set(words)) < 0.6 * len(words):
        return False
    for clause in _CLAUSE.split(question):
        beginning = [word for word in _words(clause) if word not in _LEADING]
        if beginning and beginning[0] in _ASKING:
            return True
    return False


def _echoes(words: list[str], opening: list[str]) -> bool:
    """Whether at least half of the words stand in runs that the opening holds too: the user's words handed back."""
    runs = {tuple(opening[i : i + ECHO_RUN]) for i in range(len(opening) - ECHO_RUN + 1)}
    starts = [i for i in range(len(words) - ECHO_RUN + 1) if tuple(words[i : i + ECHO_RUN]) in runs]
    echoed = {i + offset for i in starts for offset in range(ECHO_RUN)}
    return 2 * len(echoed) >= len(words)
