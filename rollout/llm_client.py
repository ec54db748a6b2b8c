"""One async client per LLM role (simulated user, judge): a question in, a checked JSON object out.

What it promises: no more than `max_concurrency` calls in flight, a hard time limit on each, few and
short retries, and never an answer that does not fit the schema. Answers are not repaired: what a
model did not finish saying is asked for again.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

import jsonschema
import openai

from rollout.settings import EndpointSettings
from rollout.types import Message

log = logging.getLogger(__name__)

Role = Literal["user", "judge"]
Check = Callable[[dict[str, Any]], None]
YAML_SECTION: Mapping[str, str] = {"user": "rollout.user.endpoint", "judge": "rewards.judge"}

CHECK_TIMEOUT_S = 10.0
LONGEST_WAIT_S = 8.0
"""Between two tries, a server's Retry-After included."""
LONGEST_WAIT_IN_ALL_S = 30.0
"""Over all tries of one question."""
HTTP_WORTH_A_RETRY = frozenset({408, 409, 425, 429})
"""Of the 4xx; every 5xx is retried, and no other status can be cured by asking again."""


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
        if not self.kind.startswith("http_"):
            return True
        status = int(self.kind.removeprefix("http_"))
        return status >= 500 or status in HTTP_WORTH_A_RETRY


@dataclass(frozen=True, slots=True)
class CallCounts:
    """What a client has done since it was made."""

    calls: int
    """Questions asked."""
    retries: int
    """Further tries of those questions."""
    failures: Mapping[str, int]
    """Questions given up, by the kind of their last error."""
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    """In flight, summed over all tries (parallel ones count each)."""


class LLMClient:
    """Asks one role's server. Any event loop may use it, one at a time."""

    def __init__(self, role: Role, settings: EndpointSettings, *, backoff_s: float = 0.5):
        """`backoff_s` scales the pauses before a retry. Raises ValueError where the key's variable is not set."""
        self.role = role
        self.settings = settings
        self._backoff_s = backoff_s
        self._key = self._read_key()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls = self._retries = self._prompt_tokens = self._completion_tokens = 0
        self._seconds = 0.0
        self._failures: Counter[str] = Counter()

    @property
    def counts(self) -> CallCounts:
        return CallCounts(
            calls=self._calls,
            retries=self._retries,
            failures=dict(self._failures),
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            seconds=self._seconds,
        )

    async def ask(
        self, messages: Sequence[Message], schema: Mapping[str, Any], validate: Check | None = None
    ) -> dict[str, Any]:
        """The model's answer, an object that fits the JSON schema.

        `validate` may refuse it with a ValueError for what a schema cannot say. Raises LLMError when
        no try gave a usable answer, or at once where asking again cannot help.
        """
        self._enter_loop()
        self._calls += 1
        wait_left_s = LONGEST_WAIT_IN_ALL_S
        for attempt in itertools.count(1):
            try:
                async with self._slots:
                    text = await self._call(messages, schema)
                return self._parse(text, schema, validate)
            except _Failed as failure:
                error = failure.error
                if attempt == self.settings.max_attempts or not error.worth_a_retry:
                    self._failures[error.kind] += 1
                    raise error from None  # the package's own error may quote the key
                pause_s = min(self._pause_s(attempt, failure.retry_after_s), wait_left_s)
            self._retries += 1
            wait_left_s -= pause_s
            log.info("%s; try %d of %d in %.1f s", error, attempt + 1, self.settings.max_attempts, pause_s)
            await asyncio.sleep(pause_s)

    def check(self) -> None:
        """Asks the server which models it has. Raises ValueError, with the remedy, where it cannot play the role."""
        section, settings = YAML_SECTION[self.role], self.settings
        where = f"{section}.base_url: {self._redact(settings.base_url)}"
        remedy = "start the role servers (bash launch/serve_roles.sh) or correct the address"
        try:
            with openai.OpenAI(
                base_url=settings.base_url, api_key=self._key, max_retries=0, timeout=CHECK_TIMEOUT_S
            ) as server:
                models = [model.id for model in server.models.list().data]
        except openai.APIStatusError as error:
            if error.status_code in (401, 403):
                remedy = f"set {section}.api_key_env to the environment variable that holds a valid key"
            elif error.status_code == 404:
                remedy = "correct the address, which usually ends in /v1"
            problem = f"answered HTTP {error.status_code}: {self._redact(error.message)}"
            raise ValueError(f"{where}: the {self.role}'s server {problem}; {remedy}") from None
        except openai.APITimeoutError:
            problem = f"did not answer in {CHECK_TIMEOUT_S:g} s"
            raise ValueError(f"{where}: the {self.role}'s server {problem}; {remedy}") from None
        except openai.APIConnectionError as error:
            problem = self._redact(str(error.__cause__ or error))
            raise ValueError(f"{where}: cannot reach the {self.role}'s server ({problem}); {remedy}") from None
        except (openai.OpenAIError, ValueError, AttributeError, TypeError):
            raise ValueError(f"{where}: what answers there is not an OpenAI-compatible server; {remedy}") from None
        if settings.model not in models:
            raise ValueError(
                f"{section}.model: {settings.model!r} is not served at {self._redact(settings.base_url)}, which has: "
                f"{', '.join(models) or 'nothing'}; name one of these, or serve that model"
            )

    async def close(self) -> None:
        """Closes the connections. The client may be used again and opens new ones then."""
        if self._loop is asyncio.get_running_loop():
            self._loop = None
            await self._server.close()

    def _read_key(self) -> str:
        variable = self.settings.api_key_env
        if variable is None:
            return "none"  # not None: the package would send OPENAI_API_KEY, to whatever server this is
        setting = f"{YAML_SECTION[self.role]}.api_key_env"
        if not re.fullmatch(r"[A-Za-z_]\w*", variable):  # not echoed: it may be a key itself
            raise ValueError(
                f"{setting}: is not the name of an environment variable; put the key into one, and name it"
            )
        key = os.environ.get(variable, "").strip()  # keys read from files end in a newline
        if not key:
            raise ValueError(
                f"{setting}: the environment variable {variable} is not set; "
                f"export it, or set api_key_env to null for a server without a key"
            )
        if not (key.isascii() and key.isprintable()):
            raise ValueError(f"{setting}: the environment variable {variable} holds characters that no key has")
        return key

    def _enter_loop(self) -> None:
        """Connections and semaphores belong to the event loop they were first used in."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._slots = asyncio.Semaphore(self.settings.max_concurrency)
            self._server = openai.AsyncOpenAI(base_url=self.settings.base_url, api_key=self._key, max_retries=0)

    async def _call(self, messages: Sequence[Message], schema: Mapping[str, Any]) -> str:
        """One HTTP call; the text of the answer. Raises _Failed."""
        started = time.monotonic()
        try:
            # wait_for, because the package's own timeout starts anew with every byte received.
            answer = await asyncio.wait_for(
                self._server.chat.completions.create(
                    model=self.settings.model,
                    messages=[dict(message) for message in messages],
                    temperature=self.settings.temperature,
                    max_tokens=self.settings.max_tokens,
                    response_format={
                        "type": "json_schema",
                        "json_schema": {"name": "answer", "schema": schema, "strict": True},
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
        finally:
            self._seconds += time.monotonic() - started
        return self._text(answer)

    def _text(self, answer: Any) -> str:
        """The answer's text. Raises _Failed."""
        try:
            choice, usage = answer.choices[0], answer.usage
            finish_reason, text = choice.finish_reason, choice.message.content or ""
            tokens = (usage.prompt_tokens or 0, usage.completion_tokens or 0) if usage else (0, 0)
            if not isinstance(text, str):
                raise TypeError(f"content of type {type(text).__name__}")
        # The package does not check shapes: a proxy's page arrives as a string, an error object without choices.
        except (AttributeError, IndexError, TypeError):
            raise self._failed("not_json", f"the server's response is not a chat completion: {answer!r}") from None
        self._prompt_tokens += tokens[0]
        self._completion_tokens += tokens[1]
        if finish_reason == "length":
            remedy = f"raise {YAML_SECTION[self.role]}.max_tokens ({self.settings.max_tokens})"
            raise self._failed("cut", f"the answer hit its token limit; {remedy}")
        return text

    def _parse(self, text: str, schema: Mapping[str, Any], validate: Check | None) -> dict[str, Any]:
        # From the first brace to the last: some servers fence the object in Markdown or add a word around it.
        start, end = text.find("{"), text.rfind("}")
        try:
            answer = json.loads(text[start : end + 1], strict=False, parse_constant=_finite, parse_float=_finite)
        except (ValueError, RecursionError) as error:
            raise self._failed("not_json", f"{error} in {text!r}") from None
        problem = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema).iter_errors(answer))
        if problem is not None:
            raise self._failed("schema", f"{problem.json_path}: {problem.message}")
        try:
            if validate is not None:
                validate(answer)
        except ValueError as error:
            raise self._failed("schema", str(error)) from None
        return answer

    def _failed(self, kind: str, detail: str, retry_after: str | None = None) -> _Failed:
        try:
            retry_after_s = _finite(retry_after or "0")
        except ValueError:  # the header may hold a date; our own pauses do then
            retry_after_s = 0.0
        return _Failed(LLMError(self.role, kind, self._redact(detail)[:400]), retry_after_s)

    def _pause_s(self, attempt: int, retry_after_s: float) -> float:
        """Exponential with full jitter, after what the server asked for; never more than LONGEST_WAIT_S."""
        jitter_s = random.uniform(0, self._backoff_s * 2 ** min(attempt - 1, 16))
        return min(max(0.0, retry_after_s) + jitter_s, LONGEST_WAIT_S)

    def _redact(self, text: str) -> str:
        for secret in (self._key if self.settings.api_key_env else None, urlsplit(self.settings.base_url).password):
            if secret:
                text = text.replace(secret, "***")
        return text


class _Failed(Exception):
    """One try failed: the error it would end with, and how long the server asked to be left alone."""

    def __init__(self, error: LLMError, retry_after_s: float):
        super().__init__(error)
        self.error, self.retry_after_s = error, retry_after_s


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits} is not a finite number")
    return value
