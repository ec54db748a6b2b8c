"""One async client per LLM role (simulated user, judge): a question in, a checked object out.

What it promises: no more calls in flight, and no more in a minute, than allowed, and no more than the servers answer
in time; a hard time limit on each; few and short retries, at another of the role's servers where there is one; and
never an answer that its reader (`rollout/roles/answers.py`) refuses.

A slow server makes a slow run, not a failed one: a try that found it overloaded uses up none of its question's tries as
long as the role's servers answer anybody. Those that have answered nobody for `patience_s` have failed.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.roles.answers import read_strictly
from rollout.roles.endpoints import Address, Balancer, Lane, Pace, presentable, read_key
from rollout.roles.overload import Pulse
from rollout.roles.question import YAML_SECTION, Caller, Check, Failed, LLMError, Question, Reader, Role
from rollout.settings import EndpointSettings
from rollout.types import Message

log = logging.getLogger(__name__)

LONGEST_PAUSE_S = 8.0
"""Between two tries of a question."""
LONGEST_PAUSE_IN_ALL_S = 30.0
"""Over all tries that a question used up."""
LONGEST_CLOSED_S = 8.0
"""How long no question goes to a server that asked for quiet (Retry-After) or refused one."""
SILENCE_TOLD_S = 30.0
"""After so long without an answer the person at the terminal is told."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a client did since it was made.

    `retries` = the sum of `errors` − the sum of `failures`, once no question is open.
    """

    calls: int = 0
    """Questions asked."""
    retries: int = 0
    """Further tries of those questions."""
    failures: Mapping[str, int] = field(default_factory=dict)
    """Questions given up, by the kind of their last error."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    """In flight, summed over all tries (parallel ones count each)."""
    errors: Mapping[str, int] = field(default_factory=dict)
    """Tries without a usable answer, by kind of LLMError."""


class LLMClient:
    """Asks one role's servers. Any event loop may use it, one at a time."""

    def __init__(self, role: Role, settings: EndpointSettings, *, backoff_s: float = 0.5):
        """`backoff_s` scales the pauses before a retry. Raises ValueError where the key's variable is not set."""
        self.role = role
        self.settings = settings
        self._backoff_s = backoff_s
        self._key = read_key(YAML_SECTION[role], settings.api_key_env)
        secrets = set().union(*(address.secrets for address in self._new_addresses()))
        self._caller = Caller(role, settings, presentable(secrets))
        self._pace = Pace(settings.max_requests_per_minute)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls = self._retries = self._open = 0
        self._seconds = 0.0
        self._errors: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()

    @property
    def counts(self) -> Usage:
        """So far."""
        return Usage(
            calls=self._calls,
            retries=self._retries,
            failures=dict(self._failures),
            prompt_tokens=self._caller.prompt_tokens,
            completion_tokens=self._caller.completion_tokens,
            seconds=self._seconds,
            errors=dict(self._errors),
        )

    async def ask(
        self,
        messages: Sequence[Message],
        schema: Mapping[str, Any],
        validate: Check | None = None,
        *,
        read: Reader = read_strictly,
    ) -> dict[str, Any]:
        """The model's answer to a question that the schema goes with.

        `read` makes an object of what the model wrote; `validate` may refuse it with a ValueError for
        what a schema cannot say. Raises LLMError when no try gave a usable answer, or at once where
        asking again cannot help.
        """
        self._enter_loop()
        self._calls += 1
        if self._open == 0:
            self._pulse.asked_anew(self._clock())
        self._open += 1
        try:
            return await self._ask(Question(messages, schema, validate, read))
        finally:
            self._open -= 1

    async def _ask(self, question: Question) -> dict[str, Any]:
        failed_at: list[Lane] = []
        used_up = 0
        wait_left_s = LONGEST_PAUSE_IN_ALL_S
        while True:
            try:
                return await self._try(question, failed_at)
            except Failed as failure:
                error = failure.error
                self._errors[error.kind] += 1
                others = len(set(failed_at)) < len(self.settings.addresses)
                used_up += not failure.overloaded
                if failure.overloaded:
                    is_last = self._pulse.silent_s(self._clock()) >= self.settings.patience_s
                else:
                    is_last = used_up == self.settings.max_attempts or not self._worth_a_retry(error, others)
                if is_last:
                    self._failures[error.kind] += 1
                    raise self._last(failure) from None  # the package's own error may quote the key
                if failure.overloaded:
                    pause_s = 0.0  # it waits for a place, and all with it for the server
                    self._tell_of_silence(error)
                else:
                    pause_s = min(self._pause_s(used_up), wait_left_s)
                    wait_left_s -= pause_s
            self._retries += 1
            log.info("%s; asked again in %.1f s", error, pause_s)
            await asyncio.sleep(pause_s)

    def _worth_a_retry(self, error: LLMError, others: bool) -> bool:
        """`others`: there are servers that this question has not failed at."""
        if error.kind == "cut" and self.settings.temperature == 0:
            return False  # the likeliest tokens are as many every time
        return error.worth_a_retry or (others and error.blames_the_server)

    def _last(self, failure: Failed) -> LLMError:
        """The error that a question ends with."""
        error, silent_s = failure.error, self._pulse.silent_s(self._clock())
        if not failure.overloaded:
            return error
        detail = f"{error.detail}; nothing was answered by {YAML_SECTION[self.role]} for {silent_s:.1f} s"
        return LLMError(error.role, error.kind, detail)

    def _tell_of_silence(self, error: LLMError) -> None:
        """Once in each silence: a run that waits for a server to come back looks like one that hangs."""
        silent_s = self._pulse.silent_s(self._clock())
        if silent_s > SILENCE_TOLD_S and self._pulse.tell():
            log.warning(
                "nothing was answered by %s for %.0f s (%s); questions wait for it, up to %.0f s",
                *(YAML_SECTION[self.role], silent_s, error.kind, self.settings.patience_s),
            )

    async def close(self) -> None:
        """Closes the connections. The client may be used again and opens new ones then."""
        if self._loop is asyncio.get_running_loop():
            self._loop = None
            for lane in self._balancer.lanes:
                await lane.address.server.close()

    def _new_addresses(self) -> list[Address]:
        return [Address(url, self._key) for url in self.settings.addresses]

    def _enter_loop(self) -> None:
        """Connections, places and what is in flight belong to the event loop they were first used in."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._clock = loop, loop.time
            self._pulse = Pulse(self.settings.timeout_s)
            self._balancer = Balancer(
                self._new_addresses(), self.settings.max_concurrency, self.settings.timeout_s, loop.time
            )

    async def _try(self, question: Question, failed_at: list[Lane]) -> dict[str, Any]:
        """Asks once, where the question has failed the least; adds to `failed_at` where it fails. Raises Failed."""
        async with self._balancer.place():
            if delay_s := self._pace.take():
                await asyncio.sleep(delay_s)
            if quiet_s := self._balancer.closed_s():  # asked for meanwhile, perhaps
                await asyncio.sleep(quiet_s)
            lane = self._balancer.pick(failed_at)
            lane.in_flight += 1
            sent_at = self._clock()
            try:
                answer = await self._caller.answer(lane.address.server, question, self.settings.timeout_s)
                lane.limit.answered(self._clock() - sent_at, lane.in_flight)
                self._pulse.answered(sent_at, self._clock())
                return answer
            except Failed as failure:
                failed_at.append(lane)
                if failure.error.kind == "timeout":
                    failure.overloaded = self._pulse.slow_since(sent_at)
                quiet_s = min(failure.retry_after_s, LONGEST_CLOSED_S)
                if failure.overloaded:
                    lane.limit.cut(sent_at, self._clock())
                    if failure.error.kind != "timeout":  # it answers others meanwhile
                        quiet_s = max(quiet_s, self._pause_s(lane.limit.cuts_in_a_row))
                if failure.error.blames_the_server:
                    self._balancer.rest(lane, quiet_s)
                    asyncio.get_running_loop().call_later(quiet_s, self._balancer.make_room)
                raise
            finally:
                lane.in_flight -= 1
                self._seconds += self._clock() - sent_at

    def _pause_s(self, attempt: int) -> float:
        """Exponential with full jitter."""
        return min(random.uniform(0, self._backoff_s * 2 ** min(attempt - 1, 16)), LONGEST_PAUSE_S)
