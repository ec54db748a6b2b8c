"""How much of what the simulated user says is the reference itself.

A user that pastes the document it wants into the chat lets any assistant score a high BLEU by handing it back.
"""

from __future__ import annotations

import re

from rollout.types import Conversation

NGRAM = 5
"""Words; shorter runs are shared by chance by any two texts on one subject."""
_WORD = re.compile(r"\w+")


def reference_overlap(conversation: Conversation) -> float | None:
    """Share of the user's words that stand in runs of five words which the reference holds too, in [0, 1].

    Of the simulated messages alone: the prompt is given. Case and punctuation do not count, and no run goes
    beyond a message. None where there is no reference, or the user said no word.
    """
    said = [_words(message["content"]) for message in conversation.new_messages if message["role"] == "user"]
    num_words = sum(map(len, said))
    if not conversation.scenario.reference or not num_words:
        return None
    known = set(_ngrams(_words(conversation.scenario.reference)))
    shared = 0
    for words in said:
        starts = [start for start, ngram in enumerate(_ngrams(words)) if ngram in known]
        shared += len({place for start in starts for place in range(start, start + NGRAM)})
    return shared / num_words


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _ngrams(words: list[str]) -> list[tuple[str, ...]]:
    return [tuple(words[start : start + NGRAM]) for start in range(len(words) - NGRAM + 1)]
