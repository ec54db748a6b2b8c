"""The batched scoring module: conversations in, rewards of the replies out.

`Scorer.submit` takes a conversation the moment it ends, while others still talk; `finish` waits for the
judgements. Per reply, in this order: the mean over its valid conversations, times the weight, clamped,
summed, less the penalty for coming close to its token limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from rewards.bleu import bleu
from rewards.interactivity import rubric
from rewards.judge import Judge
from rewards.settings import RewardSettings, SoftOverlongSettings
from rewards.tokens import token_amount
from rollout.chat import Chat
from rollout.roles.client import LLMError
from rollout.types import Conversation, Score

USER = "user"
"""Stands in `Score.failures` for the simulated user, where its failure left nothing to judge."""
MIN_STARTED = 20
"""Conversations started before a failure rate means anything."""
FAILURES_TOLD = 3


class TooManyFailures(RuntimeError):
    """More conversations than `rewards.max_failure_rate` allows could not be judged."""


@dataclass(frozen=True, slots=True)
class ReplyReward:
    """What one reply earned."""

    total: float
    """NaN where invalid: it cannot be mistaken for a score."""
    valid: bool
    means: Mapping[str, float]
    """Of each component over the valid conversations."""
    weighted: Mapping[str, float]
    """The means times their weights."""
    clamped: Mapping[str, float]
    """The weighted means within the clamp; they sum to the total plus the overlong penalty."""
    overlong: float = 0.0
    """Penalty for coming close to the token limit."""


class Scorer:
    def __init__(self, settings: RewardSettings, chat: Chat, judge: Judge | None, *, max_reply_tokens: int):
        self.settings = settings
        self.max_reply_tokens = max_reply_tokens
        self.chat = chat
        self.judge = judge
        self._tasks: dict[tuple[str, int, int], asyncio.Task[Score]] = {}
        # BLEU of a long document takes seconds, in which the loop serves others. One thread: several would keep
        # Python's lock from the loop by turns.
        self._aside = ThreadPoolExecutor(1, "bleu")

    def submit(self, conversation: Conversation) -> None:
        """Starts judging, in the running event loop. Conversations with nothing to judge cost nothing."""
        self._tasks[_key(conversation)] = asyncio.create_task(self._score(conversation))

    async def finish(self) -> dict[tuple[str, int, int], Score]:
        """Scores of everything submitted since the last `finish`, by (scenario_id, sample, continuation)."""
        tasks, self._tasks = self._tasks, {}
        await asyncio.gather(*tasks.values())
        return {key: task.result() for key, task in tasks.items()}

    async def _score(self, conversation: Conversation) -> Score:
        if conversation.ended == "simulator_failed":
            return Score({}, {USER: conversation.failure or "no usable answer"}, {})
        if conversation.first_reply_cut and self.settings.truncated != "score":
            return Score({}, {}, {})  # its reward does not come from what it says
        measured = await asyncio.gather(*(self._component(name, conversation) for name in self.settings.weights))
        values: dict[str, float] = {}
        failures: dict[str, str] = {}
        notes: dict[str, Any] = {}
        for name, outcome in zip(self.settings.weights, measured, strict=True):
            if isinstance(outcome, LLMError):
                failures[name] = str(outcome)
            else:
                values[name], note = outcome
                notes |= note
        return Score(values, failures, notes)

    async def _component(self, name: str, conversation: Conversation) -> tuple[float, dict[str, Any]] | LLMError:
        """(value, notes), or why there is none."""
        try:
            if name == "bleu_score":
                return await self._bleu(conversation)
            if name == "interactivity":
                by_judge = self.settings.interactivity.by == "llm"
                value, note = await self.judge.interactivity(conversation) if by_judge else rubric(conversation)
                return value, {"interactivity": note}
            if name == "token_amount":
                return token_amount(conversation, self.chat.num_tokens, self.settings.token_amount), {}
        except LLMError as error:
            return error
        raise AssertionError(name)  # settings know no other

    async def _bleu(self, conversation: Conversation) -> tuple[float, dict[str, Any]]:
        if self.settings.bleu_score.extract == "llm":
            document = await self.judge.extract_document(conversation)
        else:
            document = conversation.replies[-1].text
        texts = document, conversation.scenario.reference
        loop = asyncio.get_running_loop()
        word = await loop.run_in_executor(self._aside, bleu, *texts, "word")
        by_words = self.settings.bleu_score.level == "word"
        value = word if by_words else await loop.run_in_executor(self._aside, bleu, *texts, "char")
        return value, {"document": document, "bleu_word": word}

    def reward(self, conversations: Sequence[Conversation], scores: Sequence[Score]) -> ReplyReward:
        """The reward of the reply that all of `conversations` continue."""
        truncated = self.settings.truncated
        if conversations[0].first_reply_cut and truncated != "score":
            valid = truncated != "mask"
            return ReplyReward(float(truncated) if valid else float("nan"), valid, {}, {}, {})
        reward = combine(scores, self.settings.weights, self.settings.clamp)
        if not reward.valid:
            return reward
        penalty = soft_overlong(
            len(conversations[0].first_reply.token_ids), self.max_reply_tokens, self.settings.soft_overlong
        )
        return replace(reward, total=reward.total - penalty, overlong=penalty)


def combine(scores: Sequence[Score], weights: Mapping[str, float], clamp: tuple[float, float] | None) -> ReplyReward:
    """Mean over valid conversations → × weight → clamp → sum.

    >>> one = Score({"bleu_score": 0.2, "token_amount": 3.0}, {}, {})
    >>> other = Score({"bleu_score": 0.6, "token_amount": 1.0}, {}, {})
    >>> combine([one, other], {"bleu_score": 1.0, "token_amount": -0.1}, (-1, 1)).total  # 0.4 - 0.2
    0.2
    """
    valid = [score for score in scores if score.valid]
    if not valid:
        return ReplyReward(float("nan"), False, {}, {}, {})
    means = {name: fmean(score.values[name] for score in valid) for name in weights}
    weighted = {name: weight * means[name] for name, weight in weights.items()}
    low, high = clamp or (float("-inf"), float("inf"))
    clamped = {name: min(max(value, low), high) for name, value in weighted.items()}
    return ReplyReward(sum(clamped.values()), True, means, weighted, clamped)


def soft_overlong(num_tokens: int, max_tokens: int, settings: SoftOverlongSettings) -> float:
    """0 up to (1 − buffer) of the limit, then linear up to `penalty` at the limit.

    >>> soft_overlong(90, 100, SoftOverlongSettings(buffer=0.2, penalty=1.0))
    0.5
    """
    buffer = settings.buffer * max_tokens
    return settings.penalty * max(0.0, (num_tokens - (max_tokens - buffer)) / buffer)


async def score_batch(scorer: Scorer, conversations: Sequence[Conversation]) -> list[Score]:
    """Scores finished conversations, in their order: `submit` and `finish` in one call, for offline use."""
    for conversation in conversations:
        scorer.submit(conversation)
    scores = await scorer.finish()
    return [scores[_key(conversation)] for conversation in conversations]


def first_different(failures: Sequence[str]) -> list[str]:
    """The first few distinct failures."""
    return [*dict.fromkeys(failures)][:FAILURES_TOLD]


def check_failure_rate(failed: int, started: int, first_failures: Sequence[str], limit: float) -> None:
    """Raises TooManyFailures with the first few failures where more than `limit` of all conversations failed."""
    if started >= MIN_STARTED and failed > limit * started:
        causes = "\n".join(f"  - {failure}" for failure in first_different(first_failures))
        raise TooManyFailures(
            f"{failed} of {started} conversations could not be judged (rewards.max_failure_rate: {limit:g}):\n"
            f"{causes}\nCheck that the servers of rollout.user and rewards.judge answer, and that their max_tokens and "
            "timeout_s suffice."
        )


def _key(conversation: Conversation) -> tuple[str, int, int]:
    return conversation.scenario.scenario_id, conversation.sample, conversation.continuation
