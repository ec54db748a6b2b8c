"""One async client per LLM role (simulated user, judge): a question in, a checked object out.

What it promises: no more calls in flight, and no more in a minute, than allowed; a hard time limit on
each; few and short retries, at another of the role's servers where there is one; and never an answer
that its reader (`rollout/answers.py`) refuses.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import openai

from rollout.answers import UnusableAnswer, finite, read_strictly
from rollout.endpoints import Address, Balancer, Pace, presentable, read_key
from rollout.settings import EndpointSettings
from rollout.types import Message

log = logging.getLogger(__name__)

Role = Literal["user", "judge"]
Reader = Callable[[str, Mapping[str, Any]], dict[str, Any]]
"""(what the model wrote, schema) → the answer. Raises UnusableAnswer."""
Check = Callable[[dict[str, Any]], None]
YAML_SECTION: Mapping[str, str] = {"user": "rollout.user.endpoint", "judge": "rewards.judge"}

LONGEST_PAUSE_S = 8.0
"""Between two tries of a question."""
LONGEST_PAUSE_IN_ALL_S = 30.0
"""Over all tries of one question."""
LONGEST_CLOSED_S = 8.0
"""How long no question goes to a server that asked for quiet (Retry-After)."""
HTTP_WORTH_A_RETRY = frozenset({408, 409, 425, 429})
"""Of the 4xx; every 5xx is retried, and no other status can be cured by asking the same server again."""
HTTP_OF_THE_SERVER = frozenset({401, 403, 404})
"""It has another key or another model than the role's other servers."""


class LLMError(Exception):
    """A role gave no usable answer.

    `kind` is `timeout`, `connection`, `http_<status>`, `not_json`, `schema` (JSON, but not what was
    asked for) or `cut` (the answer hit max_tokens).
    """

    def __init__(self, role: str, kind: str, detail: str):
        super().__init__(role, kind, detail)
        self.role, self.kind, self.detail = role, kind, detail

    def __str__(self) -> str:
        return f"{self.role}: {self.kind}: {self.detail}"

    @property
    def worth_a_retry(self) -> bool:
        """At the same server."""
        return self._status is None or self._status >= 500 or self._status in HTTP_WORTH_A_RETRY

    @property
    def blames_the_server(self) -> bool:
        """Rather than the question or the model: another server may do better."""
        return self.kind not in ("cut", "schema") and (self.worth_a_retry or self._status in HTTP_OF_THE_SERVER)

    @property
    def _status(self) -> int | None:
        return int(self.kind.removeprefix("http_")) if self.kind.startswith("http_") else None


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


@dataclass(frozen=True, slots=True)
class _Question:
    messages: Sequence[Message]
    schema: Mapping[str, Any]
    read: Reader
    validate: Check | None


class LLMClient:
    """Asks one role's servers. Any event loop may use it, one at a time."""

    def __init__(self, role: Role, settings: EndpointSettings, *, backoff_s: float = 0.5):
        """`backoff_s` scales the pauses before a retry. Raises ValueError where the key's variable is not set."""
        self.role = role
        self.settings = settings
        self._backoff_s = backoff_s
        self._key = read_key(YAML_SECTION[role], settings.api_key_env)
        self._present = presentable(set().union(*(address.secrets for address in self._new_addresses())))
        self._pace = Pace(settings.max_requests_per_minute)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls = self._retries = self._prompt_tokens = self._completion_tokens = 0
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
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
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
        question = _Question(messages, schema, read, validate)
        failed_at: list[Address] = []
        wait_left_s = LONGEST_PAUSE_IN_ALL_S
        for attempt in itertools.count(1):
            try:
                return await self._try(question, failed_at)
            except _Failed as failure:
                error = failure.error
                self._errors[error.kind] += 1
                others = len(set(failed_at)) < len(self.settings.addresses)
                if attempt == self.settings.max_attempts or not self._worth_a_retry(error, others):
                    self._failures[error.kind] += 1
                    raise error from None  # the package's own error may quote the key
                pause_s = min(self._pause_s(attempt), wait_left_s)
            self._retries += 1
            wait_left_s -= pause_s
            log.info("%s; try %d of %d in %.1f s", error, attempt + 1, self.settings.max_attempts, pause_s)
            await asyncio.sleep(pause_s)

    def _worth_a_retry(self, error: LLMError, others: bool) -> bool:
        """`others`: there are servers that this question has not failed at."""
        if error.kind == "cut" and self.settings.temperature == 0:
            return False  # the likeliest tokens are as many every time
        return error.worth_a_retry or (others and error.blames_the_server)

    def check(self) -> None:
        """Asks every server which models it has. Raises ValueError, a line for each that cannot play the role."""
        section, model = YAML_SECTION[self.role], self.settings.model
        faults = [fault for address in self._new_addresses() if (fault := address.fault(section, model))]
        if faults:
            raise ValueError("\n".join(faults))

    async def close(self) -> None:
        """Closes the connections. The client may be used again and opens new ones then."""
        if self._loop is asyncio.get_running_loop():
            self._loop = None
            for address in self._balancer.addresses:
                await address.server.close()

    def _new_addresses(self) -> list[Address]:
        return [Address(url, self._key) for url in self.settings.addresses]

    def _enter_loop(self) -> None:
        """Connections, semaphores and what is in flight belong to the event loop they were first used in."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            addresses = self._new_addresses()
            self._balancer = Balancer(addresses, self.settings.max_concurrency)
            self._slots = asyncio.Semaphore(self.settings.max_concurrency * len(addresses))

    async def _try(self, question: _Question, failed_at: list[Address]) -> dict[str, Any]:
        """Asks once, where the question has failed the least; adds to `failed_at` where it fails. Raises _Failed."""
        async with self._slots:
            if delay_s := max(self._pace.take(), self._balancer.closed_s()):
                await asyncio.sleep(delay_s)
            address = self._balancer.pick(failed_at)
            address.in_flight += 1
            started = time.monotonic()
            try:
                return await self._answer(address.server, question)
            except _Failed as failure:
                failed_at.append(address)
                if failure.error.blames_the_server:
                    self._balancer.rest(address, min(failure.retry_after_s, LONGEST_CLOSED_S))
                raise
            finally:
                address.in_flight -= 1
                self._seconds += time.monotonic() - started

    async def _answer(self, server: openai.AsyncOpenAI, question: _Question) -> dict[str, Any]:
        try:
            answer = question.read(self._text(await self._send(server, question)), question.schema)
            if question.validate is not None:
                question.validate(answer)
            return answer
        except UnusableAnswer as error:
            raise self._failed(error.kind, str(error)) from None
        except ValueError as error:  # of `validate`
            raise self._failed("schema", str(error)) from None
        except RecursionError:  # of whatever walks through it
            raise self._failed("not_json", "it is nested too deeply") from None

    async def _send(self, server: openai.AsyncOpenAI, question: _Question) -> Any:
        """The server's response, of whatever shape. Raises _Failed."""
        try:
            # wait_for, because the package's own timeout starts anew with every byte received.
            return await asyncio.wait_for(
                server.chat.completions.create(
                    model=self.settings.model,
                    messages=[dict(message) for message in question.messages],
                    temperature=self.settings.temperature,
                    max_tokens=self.settings.max_tokens,
                    response_format={
                        "type": "json_schema",
                        "json_schema": {"name": "answer", "schema": question.schema, "strict": True},
                    },
                    extra_body={"chat_template_kwargs": {"enable_thinking": self.settings.thinking}},
                    timeout=self.settings.timeout_s,
                ),
                self.settings.timeout_s,
            )
        except (asyncio.TimeoutError, openai.APITimeoutError):
            raise self._failed("timeout", f"no answer in {self.settings.timeout_s:g} s") from None
        except openai.APIStatusError as error:
            retry_after = error.response.headers.get("retry-after")
            raise self._failed(f"http_{error.status_code}", error.message, retry_after) from None
        except openai.APIConnectionError as error:
            raise self._failed("connection", str(error.__cause__ or error)) from None
        except (openai.OpenAIError, ValueError) as error:
            raise self._failed("not_json", f"the server's response is not JSON: {error}") from None

    def _text(self, answer: Any) -> str:
        """The answer's text. Raises _Failed."""
        try:
            choice, usage = answer.choices[0], answer.usage
            finish_reason, text = choice.finish_reason, choice.message.content or ""
            if not isinstance(text, str):
                raise TypeError(f"content of type {type(text).__name__}")
        # The package does not check shapes: a proxy's page arrives as a string, an error object without choices.
        except (AttributeError, LookupError, TypeError):
            raise self._failed("not_json", f"the server's response is not a chat completion: {answer!r}") from None
        self._prompt_tokens += _count(usage, "prompt_tokens")
        self._completion_tokens += _count(usage, "completion_tokens")
        if finish_reason == "length":
            remedy = f"raise {YAML_SECTION[self.role]}.max_tokens ({self.settings.max_tokens})"
            raise self._failed("cut", f"the answer hit its token limit; {remedy}")
        return text

    def _failed(self, kind: str, detail: str, retry_after: str | None = None) -> _Failed:
        try:
            retry_after_s = max(0.0, finite(retry_after or "0"))
        except ValueError:  # the header may hold a date; our own pauses do then
            retry_after_s = 0.0
        return _Failed(LLMError(self.role, kind, self._present(detail)), retry_after_s)

    def _pause_s(self, attempt: int) -> float:
        """Exponential with full jitter."""
        return min(random.uniform(0, self._backoff_s * 2 ** min(attempt - 1, 16)), LONGEST_PAUSE_S)


class _Failed(Exception):
    """One try failed: the error it would end with, and how long the server asked to be left alone."""

    def __init__(self, error: LLMError, retry_after_s: float):
        super().__init__(error)
        self.error, self.retry_after_s = error, retry_after_s


def _count(usage: Any, name: str) -> int:
    """A number of tokens, 0 where the server does not tell or tells nonsense."""
    value = getattr(usage, name, 0)
    return value if type(value) is int and value > 0 else 0
