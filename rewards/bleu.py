"""BLEU of the document against the reference, over characters as published, or over words.

The published figure is BLEU over *characters*, whitespace included, without smoothing: unrelated
English texts already score about 0.33. Word BLEU is logged beside it, because it is honest.
"""

from __future__ import annotations

from typing import Literal

from sacrebleu.metrics import BLEU
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a
from sacrebleu.tokenizers.tokenizer_re import TokenizerRegexp

_WHITESPACE = "␣"
_CHARACTERS = BLEU(tokenize="none", smooth_method="none", effective_order=False)
_WORDS = BLEU(tokenize="13a", smooth_method="exp", effective_order=True)


def bleu(document: str, reference: str, level: Literal["char", "word"]) -> float:
    """In [0, 1]. `char`: n-grams of characters up to 4, unsmoothed; `word`: sacrebleu's sentence BLEU.

    An empty document scores 0.
    """
    if level == "word":
        score = _WORDS.sentence_score(document, [reference]).score / 100
        for tokenizer in (Tokenizer13a, TokenizerRegexp):  # whose caches hold 65,536 texts: half a GiB of documents
            tokenizer.__call__.cache_clear()
        return score
    return _CHARACTERS.corpus_score([_spelled(document)], [[_spelled(reference)]]).score / 100


def _spelled(text: str) -> str:
    """Characters as sacrebleu's tokens; whitespace becomes a visible symbol, or it would be lost."""
    return " ".join(_WHITESPACE if character.isspace() else character for character in text)
