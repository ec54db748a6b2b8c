"""BLEU of the document against the reference, over characters as published, or over words.

The published figure is BLEU over *characters*, whitespace included, without smoothing: unrelated
English texts already score about 0.33. Word BLEU is logged beside it, because it is honest.
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import Literal

import numpy as np
from sacrebleu.metrics import BLEU
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a
from sacrebleu.tokenizers.tokenizer_re import TokenizerRegexp

MAX_NGRAM = 4
CODE_POINT_BITS = 21
"""Bits that hold any code point; a rank among the n-grams of two texts fits into the other 42."""
_WORDS = BLEU(tokenize="13a", smooth_method="exp", effective_order=True)


def bleu(document: str, reference: str, level: Literal["char", "word"]) -> float:
    """In [0, 1]. `char`: n-grams of characters up to 4, unsmoothed; `word`: sacrebleu's sentence BLEU.

    An empty document scores 0.
    """
    return _word_bleu(document, reference) if level == "word" else _char_bleu(document, reference)


def _word_bleu(document: str, reference: str) -> float:
    score = _WORDS.sentence_score(document, [reference]).score / 100
    for tokenizer in (Tokenizer13a, TokenizerRegexp):  # whose caches hold 65,536 texts: half a GiB of documents
        tokenizer.__call__.cache_clear()
    return score


def _char_bleu(document: str, reference: str) -> float:
    """exp(min(0, 1 − r/d) + mean over n = 1 … 4 of log(shared n-grams ÷ the document's)), d and r the lengths.

    Papineni et al. 2002 over code points, each a symbol of its own; nltk's `sentence_bleu` over the two strings.
    0 where not even one run of four characters is shared (nltk: below 1e-76).
    """
    texts = [_code_points(document), _code_points(reference)]
    ngrams, logs = texts, []
    for n in range(1, MAX_NGRAM + 1):
        distinct, ranks = np.unique(np.concatenate(ngrams), return_inverse=True)
        ranked = np.split(ranks, [len(ngrams[0])])
        shared = int(np.minimum(*(np.bincount(own, minlength=len(distinct)) for own in ranked)).sum())
        if not shared:
            return 0.0
        logs.append(math.log(shared / len(ranked[0])))
        # One longer: the rank of its first n characters, and the next character.
        ngrams = [own[:-1] << CODE_POINT_BITS | text[n:] for own, text in zip(ranked, texts, strict=True)]
    return math.exp(min(0.0, 1 - len(reference) / len(document)) + fmean(logs))


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4").astype(np.int64)
