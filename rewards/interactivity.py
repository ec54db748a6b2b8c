"""A deterministic stand-in for the judge's interactivity: does the assistant ask, and then use what it is told?

A person calls a question good when it is put in words, is about what they want, comes alone or with one
other, and is followed by silence: who asks and then writes on has not asked. A bare question mark earns
nothing, and neither does asking again what was just answered. It reads English; in other languages use the
judge (`by: llm`).
"""

from __future__ import annotations

import re

from rollout.roles.simulator import asks_something
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
_SPOKEN_TO = frozenset("you your yours i we us".split())
_PIECE = frozenset(
    "piece article text story post draft say write mention include cover tone style reader readers audience "
    "length".split()
)
_COMMON = frozenset(
    "a about after again ah all already also am an and any are as at be because been before being but by can "
    "could did do does doing few for from get glad give go good had has have hello help her here him his how i "
    "i'd i'm if in into is it its just know let like look make me might mind more most much my need new no not "
    "now of on one only or other our out over own people piece please question quite really right say see share "
    "short should so some something story sure take tell text than that the their them then there these they "
    "thing things think this those to too up us use very want was way we were what when where which while who why "
    "will with work would write writing yes you your hi article draft".split()
)
MIN_WORDS, MAX_WORDS, MAX_QUESTIONS, MAX_WORDS_AFTER = 3, 40, 2, 15
ECHO_RUN = 3
"""Words in a row that make a quotation of the user."""
UNFINISHED = 0.75
"""Factor on a reply that was cut off: its reader has to guess the rest."""
LATE = 0.5
"""Factor on a question that the first reply should have asked."""
AGAIN = 0.25
"""Factor on the use of what was told, where something is said or asked again."""
TWICE_RUN = 8
"""Words in a row that stand in a reply twice, when it says the same twice."""
MIN_TOLD, ALL_TOLD = 3, 0.8
"""Content words that make a message tell something; the share of them that a reply need take up."""


def rubric(conversation: Conversation) -> tuple[float, dict[str, object]]:
    """A value in [0, 1] and what it counted: the mean of how well the assistant asked and how well it used the answers.

    Asking is the value of the first reply's question (`question_value`), or half of a later reply's where the first
    asked nothing. Using is the share of what the user told that the last reply takes up (`_used`), 0 where the user
    told nothing. It is worth a quarter where the last reply says the same twice, or a reply repeats a question of an
    earlier one. Where nobody came to answer the first reply, as with `rollout.continuations: 0`, asking alone counts.
    """
    first = conversation.first_reply
    opening = _words(conversation.opening)
    asks, counted = question_value(first, opening)
    if len(conversation.replies) == 1 and not first.cut:
        return asks, counted
    later = conversation.replies[1:]
    if not asks:
        asks = LATE * max((question_value(reply, opening)[0] for reply in later), default=0.0)
    uses, again = _used(conversation, opening), _asks_again(conversation) or _says_twice(conversation.replies[-1])
    return (asks + (AGAIN * uses if again else uses)) / 2, counted | {"asks": asks, "uses": uses, "again": again}


def question_value(reply: Reply, opening: list[str]) -> tuple[float, dict[str, object]]:
    """How good the reply's question is, in [0, 1], and what was counted; `opening` are the words it answers.

    A question counts as worded where it has 3 to 40 words, not the same few over again and less than half of them
    quoted from the user's opening (three in a row or more), and begins, or goes on after a comma, with a question
    word or an auxiliary. An offer ("How can I help?") asks nothing. The best worded question decides:

    - 1: about the piece: it names the piece or what a piece has ("the article", "mention", "the tone"), or it is both
      on the topic, by "it" or the stem of a content word of the user's opening, and addressed to the user ("you", "I");
    - 0.5: on the topic alone, as in a quiz ("What is honey?"), or addressed to the user alone, as small talk is ("What
      brings you here today?");
    - 0.25: neither;
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
    values = [_about(words, topic) for words in worded]
    if not worded or len(set(map(tuple, worded))) < len(worded):
        value = 0.0
    else:
        value = max(values)
    if len(asked) > MAX_QUESTIONS:
        value = min(value, 0.5)
    if asked and sum(len(_words(sentence)) for sentence in sentences[asked[-1] + 1 :]) > MAX_WORDS_AFTER:
        value *= 0.5
    if reply.cut:
        value *= UNFINISHED
    return value, {"questions": len(asked), "worded": len(worded), "about_piece": values.count(1.0)}


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
        if any(words and (words == old or _echoes(words, old)) for words in questions for old in earlier):
            return True
        earlier += questions
    return False


def _says_twice(reply: Reply) -> bool:
    runs = _runs(_words(reply.text), TWICE_RUN)
    return len(set(runs)) < len(runs)


def _about(words: list[str], topic: frozenset[str]) -> float:
    """What a worded question is worth."""
    on_topic = "it" in words or not topic.isdisjoint(map(_stem, words))
    addressed = not _SPOKEN_TO.isdisjoint(words)
    if not _PIECE.isdisjoint(words) or (on_topic and addressed):
        return 1.0
    return 0.5 if on_topic or addressed else 0.25


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
    said = set(_runs(opening, ECHO_RUN))
    starts = [start for start, run in enumerate(_runs(words, ECHO_RUN)) if run in said]
    echoed = {start + offset for start in starts for offset in range(ECHO_RUN)}
    return 2 * len(echoed) >= len(words)


def _runs(words: list[str], length: int) -> list[tuple[str, ...]]:
    """All runs of so many words, each one word after the last."""
    return [tuple(words[start : start + length]) for start in range(len(words) - length + 1)]
