"""Plays conversations: first replies, then their continuations with the simulated user.

There is no barrier: every conversation is a coroutine that takes its next turn the moment its own
user has answered, and is handed to `on_end` the moment it ends, while others still talk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rollout.chat import Chat
from rollout.data import sample_seed
from rollout.engines.interface import SampleRequest
from rollout.engines.sharing import SharedEngine
from rollout.roles.client import LLMError
from rollout.roles.simulator import UserTurn
from rollout.settings import RolloutSettings
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
    max_new_turns: int | None = None
    """Most messages after the prompt, user and assistant together; replaces max_user_turns and max_assistant_turns. The
    assistant speaks last, so one may be left unused."""
    user_opens: bool = False
    """The prompt is only its system message, and the simulated user writes the opening."""

    @classmethod
    def of_training(cls, settings: RolloutSettings, run_seed: int, step: int) -> RolloutPlan:
        return cls(settings.group_size, settings.continuations, settings.temperature, run_seed, step)

    def turn_limits(self, settings: RolloutSettings) -> tuple[int, int]:
        """(simulated user messages, assistant messages) of a conversation, at most."""
        if self.max_new_turns is None:
            return settings.max_user_turns, settings.max_assistant_turns
        num_replies = (self.max_new_turns + (not self.user_opens)) // 2
        # The user does not answer the last reply, since no assistant turn would follow.
        return num_replies, num_replies


@dataclass(slots=True)
class _Talk:
    """A conversation under way: all there is to know about it, and about no other."""

    scenario: Scenario
    sample: int
    continuation: int
    prompt: tuple[Message, ...]
    new_messages: list[Message]
    replies: list[Reply]

    @property
    def messages(self) -> tuple[Message, ...]:
        return (*self.prompt, *self.new_messages)

    def as_sampled(self, chat: Chat) -> list[Message]:
        """The messages as the chat template is given them: replies with their thoughts."""
        replies = iter(self.replies)
        new = (chat.as_sampled(next(replies)) if m["role"] == "assistant" else m for m in self.new_messages)
        return [*self.prompt, *new]

    @property
    def num_user_turns(self) -> int:
        return len(self.new_messages) - len(self.replies)

    def branch(self, continuation: int) -> _Talk:
        return replace(self, continuation=continuation, new_messages=[*self.new_messages], replies=[*self.replies])

    def add(self, reply: Reply) -> None:
        self.new_messages.append({"role": "assistant", "content": reply.text})
        self.replies.append(reply)

    def ended(self, how: Ending, *, farewell: str | None = None, failure: str | None = None) -> Conversation:
        return Conversation(
            scenario=self.scenario,
            sample=self.sample,
            continuation=self.continuation,
            messages=self.messages,
            num_prompt_messages=len(self.prompt),
            replies=tuple(self.replies),
            ended=how,
            farewell=farewell,
            failure=failure,
        )


class Rollout:
    """One rank's conversations: the engine, the chat template and the simulated user together."""

    def __init__(self, settings: RolloutSettings, engine: SharedEngine, chat: Chat, user: User):
        self.settings = settings
        self.engine = engine
        self.chat = chat
        self.user = user

    async def play(
        self,
        scenarios: Sequence[Scenario],
        plan: RolloutPlan,
        on_end: Callable[[Conversation], None],
        samples_P: Sequence[Sequence[int]] | None = None,
    ) -> list[list[list[Conversation]]]:
        """Conversations by [scenario][sample][continuation]; `samples_P`: which samples of each, None: all.

        A first reply cut by its token limit has one conversation, which ends with it; so has every
        reply where `continuations` is 0. `on_end` is called in this event loop as each one ends.
        """
        samples_P = samples_P or [range(plan.group_size)] * len(scenarios)
        async with asyncio.TaskGroup() as tasks:
            groups = [
                [tasks.create_task(self._sample(scenario, sample, plan, on_end)) for sample in samples]
                for scenario, samples in zip(scenarios, samples_P, strict=True)
            ]
        return [[task.result() for task in group] for group in groups]

    async def _sample(
        self, scenario: Scenario, sample: int, plan: RolloutPlan, on_end: Callable[[Conversation], None]
    ) -> list[Conversation]:
        prompt = scenario.system if plan.user_opens else scenario.messages
        talk = _Talk(scenario, sample, 0, prompt, [], [])
        over = await self._begin(talk, plan)
        if over:
            on_end(over)
            return [over]

        async def continued(continuation: int) -> Conversation:
            conversation = await self._continue(talk.branch(continuation), plan)
            on_end(conversation)
            return conversation

        async with asyncio.TaskGroup() as tasks:
            started = [tasks.create_task(continued(continuation)) for continuation in range(plan.continuations)]
        return [task.result() for task in started]

    async def _begin(self, talk: _Talk, plan: RolloutPlan) -> Conversation | None:
        """Takes the first reply, after the user's opening where the user opens; the conversation if it ends there."""
        if plan.user_opens:
            try:
                opening = await self._answer(talk)
            except LLMError as error:
                return talk.ended("simulator_failed", failure=str(error))
            if opening.satisfied:
                return talk.ended("simulator_failed", failure="the user ended the chat instead of opening it")
            talk.new_messages.append({"role": "user", "content": opening.text})
        seed = sample_seed(plan.run_seed, plan.step, talk.scenario.row, talk.sample, turn=0)
        prompt_ids = self.chat.prompt_ids(talk.messages)
        first = await self._reply(prompt_ids, self.settings.max_reply_tokens, plan.temperature, seed)
        if first is None:
            if plan.user_opens:
                return talk.ended("simulator_failed", failure="the user's opening fills the whole context")
            raise ValueError(
                f"{talk.scenario.scenario_id}: the prompt fills the whole context; raise engine.max_context_tokens"
            )
        talk.add(first)
        if first.cut:
            return talk.ended("length")
        return talk.ended("turn_limit") if plan.continuations == 0 else None

    async def _continue(self, talk: _Talk, plan: RolloutPlan) -> Conversation:
        max_user_turns, max_assistant_turns = plan.turn_limits(self.settings)
        while talk.num_user_turns < max_user_turns and len(talk.replies) < max_assistant_turns:
            try:
                turn = await self._answer(talk)
            except LLMError as error:
                return talk.ended("simulator_failed", failure=str(error))
            if turn.satisfied:
                return talk.ended("user_satisfied", farewell=turn.text)
            said: Message = {"role": "user", "content": turn.text}
            is_last = talk.num_user_turns + 1 == max_user_turns or len(talk.replies) + 1 == max_assistant_turns
            if is_last and not self.settings.judge_last_reply:
                talk.new_messages.append(said)
                return talk.ended("turn_limit")
            number = (talk.continuation + 1) * 1000 + len(talk.replies)
            seed = sample_seed(plan.run_seed, plan.step, talk.scenario.row, talk.sample, turn=number)
            prompt_ids = self.chat.next_prompt_ids(talk.as_sampled(self.chat), talk.replies[-1], said)
            reply = await self._reply(prompt_ids, self.settings.later_reply_tokens, plan.temperature, seed)
            if reply is None:
                return talk.ended("context_full")
            talk.new_messages.append(said)
            talk.add(reply)
            if reply.cut:
                return talk.ended("length")
        return talk.ended("turn_limit")

    async def _answer(self, talk: _Talk) -> UserTurn:
        """What the user says next, of which no part can pass for an end of turn. Raises LLMError."""
        turn = await self.user.answer(talk.scenario, talk.messages)
        text = self.chat.without_control_tokens(turn.text)
        if not text and not turn.satisfied:
            raise LLMError("user", "schema", "the user's reply is nothing but control tokens")
        return UserTurn(text, turn.satisfied)

    async def _reply(self, prompt_ids: Sequence[int], max_tokens: int, temperature: float, seed: int) -> Reply | None:
        """The policy's next message, or None where the context has no room for one."""
        room = self.engine.engine.max_context_tokens - len(prompt_ids)
        if room < 1:
            return None
        request = SampleRequest(tuple(prompt_ids), min(max_tokens, room), temperature, seed)
        sampled = await self.engine.sample(request)
        thought, text = self.chat.read(sampled.token_ids)
        untrained = 0
        if thought and not self.settings.train_thoughts:
            untrained = self.chat.num_thought_tokens(sampled.token_ids, thought)
        return Reply(
            request.prompt_ids, sampled.token_ids, sampled.logprobs, text, sampled.finish_reason, thought, untrained
        )
