"""Plays conversations: first replies, then their continuations with the simulated user.

There is no barrier: every conversation is a coroutine that takes its next turn the moment its own
user has answered, and is handed to `on_end` the moment it ends, while others still talk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rollout.chat import Chat
from rollout.data import sample_seed
from rollout.engine import SampleRequest, SharedEngine
from rollout.llm_client import LLMError
from rollout.settings import RolloutSettings
from rollout.simulator import UserTurn
from rollout.types import Conversation, Ending, Message, Reply, Scenario


class User(Protocol):
    async def answer(self, scenario: Scenario, messages: Sequence[Message]) -> UserTurn:
        """The user's next message. Raises LLMError where there is no usable one."""


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """How many of what to sample: training and evaluation differ only here."""

    group_size: int
    continuations: int
    temperature: float
    run_seed: int
    step: int


class Rollout:
    """One rank's conversations: the engine, the chat template and the simulated user together."""

    def __init__(self, settings: RolloutSettings, engine: SharedEngine, chat: Chat, user: User):
        self.settings = settings
        self.engine = engine
        self.chat = chat
        self.user = user

    async def play(
        self, scenarios: Sequence[Scenario], plan: RolloutPlan, on_end: Callable[[Conversation], None]
    ) -> list[list[list[Conversation]]]:
        """Conversations by [scenario][sample][continuation].

        A first reply cut by its token limit has one conversation, which ends with it; so has every
        reply where `continuations` is 0. `on_end` is called in this event loop as each one ends.
        """
        async with asyncio.TaskGroup() as tasks:
            samples = [
                [tasks.create_task(self._sample(scenario, sample, plan, on_end)) for sample in range(plan.group_size)]
                for scenario in scenarios
            ]
        return [[task.result() for task in group] for group in samples]

    async def _sample(
        self, scenario: Scenario, sample: int, plan: RolloutPlan, on_end: Callable[[Conversation], None]
    ) -> list[Conversation]:
        seed = sample_seed(plan.run_seed, plan.step, scenario.row, sample, turn=0)
        first = await self._reply(scenario.messages, self.settings.max_reply_tokens, plan.temperature, seed)
        if first is None:
            raise ValueError(
                f"{scenario.scenario_id}: the prompt fills the whole context; raise engine.max_context_tokens"
            )
        if first.finish_reason == "length" or plan.continuations == 0:
            ended: Ending = "length" if first.finish_reason == "length" else "turn_limit"
            conversation = self._ended(scenario, sample, 0, [_assistant(first)], [first], ended)
            on_end(conversation)
            return [conversation]

        async def continued(continuation: int) -> Conversation:
            conversation = await self._continue(scenario, sample, continuation, first, plan)
            on_end(conversation)
            return conversation

        return list(await asyncio.gather(*map(continued, range(plan.continuations))))

    async def _continue(
        self, scenario: Scenario, sample: int, continuation: int, first: Reply, plan: RolloutPlan
    ) -> Conversation:
        limits = self.settings
        new_messages, replies = [_assistant(first)], [first]
        user_turns = 0

        def ended(how: Ending, *, farewell: str | None = None, failure: str | None = None) -> Conversation:
            return self._ended(scenario, sample, continuation, new_messages, replies, how, farewell, failure)

        while user_turns < limits.max_user_turns and len(replies) < limits.max_assistant_turns:
            history = [*scenario.messages, *new_messages]
            try:
                turn = await self.user.answer(scenario, history)
            except LLMError as error:
                return ended("simulator_failed", failure=str(error))
            if turn.satisfied:
                return ended("user_satisfied", farewell=turn.text)
            user_turns += 1
            said: Message = {"role": "user", "content": turn.text}
            is_last = user_turns == limits.max_user_turns or len(replies) + 1 == limits.max_assistant_turns
            if is_last and not limits.judge_last_reply:
                new_messages.append(said)
                return ended("turn_limit")
            seed = sample_seed(
                plan.run_seed, plan.step, scenario.row, sample, turn=(continuation + 1) * 1000 + len(replies)
            )
            reply = await self._reply([*history, said], limits.later_reply_tokens, plan.temperature, seed)
            if reply is None:
                return ended("context_full")
            new_messages += [said, _assistant(reply)]
            replies.append(reply)
            if reply.finish_reason == "length":
                return ended("length")
        return ended("turn_limit")

    async def _reply(self, messages: Sequence[Message], max_tokens: int, temperature: float, seed: int) -> Reply | None:
        """The policy's next message, or None where the context has no room for one."""
        prompt_ids = tuple(self.chat.prompt_ids(messages))
        room = self.engine.engine.max_context_tokens - len(prompt_ids)
        if room < 1:
            return None
        sampled = await self.engine.sample(SampleRequest(prompt_ids, min(max_tokens, room), temperature, seed))
        return Reply(
            prompt_ids, sampled.token_ids, sampled.logprobs, self.chat.text(sampled.token_ids), sampled.finish_reason
        )

    @staticmethod
    def _ended(
        scenario: Scenario,
        sample: int,
        continuation: int,
        new_messages: Sequence[Message],
        replies: Sequence[Reply],
        how: Ending,
        farewell: str | None = None,
        failure: str | None = None,
    ) -> Conversation:
        return Conversation(
            scenario=scenario,
            sample=sample,
            continuation=continuation,
            messages=(*scenario.messages, *new_messages),
            num_prompt_messages=len(scenario.messages),
            replies=tuple(replies),
            ended=how,
            farewell=farewell,
            failure=failure,
        )


def _assistant(reply: Reply) -> Message:
    return {"role": "assistant", "content": reply.text}
