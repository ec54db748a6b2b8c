"""BLEU: the published figure over characters, whatever the characters, and beside the event loop."""

from __future__ import annotations

import asyncio
import math
import time
import warnings
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nltk.translate.bleu_score import sentence_bleu
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a
from sacrebleu.tokenizers.tokenizer_re import TokenizerRegexp

from rewards.bleu import bleu
from rewards.scoring import Scorer, score_batch
from rewards.settings import RewardSettings
from rollout.types import Conversation, Reply, Scenario


def test_identical_texts_score_one():
    assert bleu("The hive hums.", "The hive hums.", "char") == pytest.approx(1)
    assert bleu("The hive hums today.", "The hive hums today.", "word") == pytest.approx(1)


def test_char_bleu_by_hand():
    # "abcdx" against "abcde": 4/5 single characters, 3/4 pairs, 2/3 triples, 1/2 quadruples, equal lengths.
    assert bleu("abcdx", "abcde", "char") == pytest.approx((4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)


def test_an_ngram_counts_as_often_as_the_reference_has_it():
    # "aaaaaa" against "aaaab": 4/6 single characters, 3/5 pairs, 2/4 triples, 1/3 quadruples, no penalty.
    assert bleu("aaaaaa", "aaaab", "char") == pytest.approx((4 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25)


def test_char_bleu_counts_whitespace():
    # "ab cd" against "abcd": of its 5 characters 4 match; of its pairs ab, b␣, ␣c, cd two; no triple does.
    assert bleu("ab cd", "abcd", "char") == 0
    assert bleu("ab cde", "ab cde", "char") == pytest.approx(1)


def test_a_short_document_pays_the_brevity_penalty():
    # All its n-grams match; 5 characters for 10: exp(1 - 10/5).
    assert bleu("abcde", "abcdefghij", "char") == pytest.approx(math.exp(-1))


@pytest.mark.parametrize(
    ("document", "reference", "published"),
    [  # by nltk 3.10.4
        ("Title The bees hum. They keep warm.", "Title\nThe bees hum.\nThey keep warm.", 0.8452785147119855),
        ("tab\tsep\tvalues here", "tab sep values here", 0.6888365053466561),
        ("word␣word␣word", "word word word", 0.5333505353503044),
        ("CR\r\nLF lines\r\n", "CR\nLF lines\n", 0.6591844162499148),
        ("a\u00a0thin\u2009space", "a thin space", 0.5452469119630863),
        ("hum the bees hum", "the bees\u200b hum", 0.6026080978557137),
        ("a\u2028b\u3000c\x1cd", "a b c d", 1.583976781977924e-231),
        ("e\u0301t\u00e9", "\u00e9te\u0301", 1.133422688662942e-154),
        ("a \ud800 b", "a \ud801 b", 1.1862800137389335e-154),
        ("\n\n\n\n", "\n\n\n\n", 1.0),
        ("abc", "abc", 1.2213386697554703e-77),
        ("", "", 0.0),
        ("a", "", 0.0),
        ("", "a", 0.0),
    ],
)
def test_char_bleu_is_the_published_figure(document, reference, published):
    assert bleu(document, reference, "char") == pytest.approx(published, abs=1e-9)
    assert published_bleu(document, reference) == published


def published_bleu(document: str, reference: str) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # where no run of a length is shared
        return sentence_bleu([reference], document)


ODD = st.text("ab \t\n\r\x1c\x85\xa0\u2028\u3000\u200b␣e\u0301é\ud800\udfff😀", max_size=40)


@given(ODD | st.text(st.characters(exclude_categories=())), ODD, ODD | st.text(st.characters(exclude_categories=())))
def test_char_bleu_is_the_published_one_on_any_two_texts(before, shared, after):
    for document, reference in ((before + shared, shared + after), (shared, before + shared), (before, after)):
        assert bleu(document, reference, "char") == pytest.approx(published_bleu(document, reference), abs=1e-9)


def test_word_bleu_keeps_no_texts():
    for number in range(3):
        bleu(f"The hive hums {number} times.", "The hive hums.", "word")
    assert Tokenizer13a.__call__.cache_info().currsize == TokenizerRegexp.__call__.cache_info().currsize == 0


def test_an_empty_document_scores_zero():
    assert bleu("", "something", "char") == 0 and bleu("", "something", "word") == 0


def test_unrelated_english_already_scores_a_third_of_char_bleu():
    one = "Our hive sits eleven floors above the street, tied down with straps against the wind, and the bees come home yellow."
    other = (
        "The last train to the coast was full of people who had missed the first, and nobody seemed to mind very much."
    )
    assert 0.2 < bleu(one, other, "char") < 0.45
    assert bleu(one, other, "word") < 0.1


def talk_that_ends_in(document: str, reference: str) -> Conversation:
    asked, said = {"role": "user", "content": "Write."}, {"role": "assistant", "content": document}
    scenario = Scenario("test/0", (asked,), "", "", reference, "test", 0)
    reply = Reply((1,), (2,), (0.0,), document, "stop")
    return Conversation(scenario, 0, 0, (asked, said), 1, (reply,), "turn_limit")


def scorer_by(level: str) -> Scorer:
    settings = RewardSettings(weights={"bleu_score": 1.0}, bleu_score={"extract": "last", "level": level})
    return Scorer(settings, chat=None, judge=None, max_reply_tokens=8)


@pytest.mark.parametrize("level", ["char", "word"])
def test_the_level_says_which_bleu_is_the_score_and_word_bleu_is_noted(level):
    document, reference = "Bees keep the hive warm in winter.", "The bees keep their hive warm."
    [score] = asyncio.run(score_batch(scorer_by(level), [talk_that_ends_in(document, reference)]))
    assert score.values == {"bleu_score": bleu(document, reference, level)}
    assert score.notes["bleu_word"] == bleu(document, reference, "word") != bleu(document, reference, "char")


def test_the_event_loop_turns_while_long_texts_are_compared():
    text = " ".join(Random(1).choices("the hive hums, and bees keep warm. it is eleven floors up".split(), k=30_000))
    talk = talk_that_ends_in(text, text)

    async def longest_pause_and_whole():
        scorer, pauses, start = scorer_by("char"), [], time.perf_counter()
        for continuation in range(3):
            scorer.submit(replace(talk, continuation=continuation))
        scores = asyncio.create_task(scorer.finish())
        while not scores.done():
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            pauses.append(time.perf_counter() - before)
        assert [score.values["bleu_score"] for score in (await scores).values()] == pytest.approx([1.0] * 3)
        return max(pauses), time.perf_counter() - start

    pause, whole = asyncio.run(longest_pause_and_whole())
    assert pause < whole / 3  # on the loop: nearly all of it
