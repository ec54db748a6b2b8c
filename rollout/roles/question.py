"""One question to one server: what is sent, and what the response is taken for, an answer or an error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import httpx2
import openai

from rollout.roles.answers import UnusableAnswer, finite, read_strictly
from rollout.settings import EndpointSettings
from rollout.types import Message

Role = Literal["user", "judge"]
Reader = Callable[[str, Mapping[str, Any]], dict[str, Any]]
"""(what the model wrote, schema) → the answer. Raises UnusableAnswer."""
Check = Callable[[dict[str, Any]], None]
YAML_SECTION: Mapping[str, str] = {"user": "rollout.user.endpoint", "judge": "rewards.judge"}

HTTP_WORTH_A_RETRY = frozenset({408, 409, 425, 429})
"""Of the 4xx; every 5xx is retried, and no other status can be cured by asking the same server again."""
HTTP_OF_THE_SERVER = frozenset({401, 403, 404})
"""It has another key or another model than the role's other servers."""
HTTP_OVERLOADED = frozenset({429, 502, 503, 504, 529})
"""Of a server with too much to do, or of the gateway before one that has or that starts anew."""


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
        return self.status is None or self.status >= 500 or self.status in HTTP_WORTH_A_RETRY

    @property
    def blames_the_server(self) -> bool:
        """Rather than the question or the model: another server may do better."""
        return self.kind not in ("cut", "schema") and (self.worth_a_retry or self.status in HTTP_OF_THE_SERVER)

    @property
    def status(self) -> int | None:
        return int(self.kind.removeprefix("http_")) if self.kind.startswith("http_") else None


class Failed(Exception):
    """One try failed."""

    def __init__(
        self, error: LLMError, *, retry_after_s: float = 0.0, overloaded: bool = False, foreign: bool = False
    ):
        """`retry_after_s`: how long the server asked to be left alone; `overloaded`: it had too much to do, or was
        away (of a timeout the caller knows that better); `foreign`: what answered is no such server."""
        super().__init__(error)
        self.error, self.retry_after_s, self.overloaded, self.foreign = error, retry_after_s, overloaded, foreign


@dataclass(frozen=True, slots=True)
class Question:
    """`read` makes an object of what the model wrote; `validate` may refuse it with a ValueError for what a schema
    cannot say."""

    messages: Sequence[Message]
    schema: Mapping[str, Any]
    validate: Check | None = None
    read: Reader = read_strictly


class Caller:
    """Asks any server of a role, and counts the tokens that this took."""

    def __init__(self, role: Role, settings: EndpointSettings, present: Callable[[str], str]):
        """`present` makes what a server said fit for messages (`endpoints.presentable`)."""
        self.role, self.settings, self._present = role, settings, present
        self.prompt_tokens = self.completion_tokens = 0

    async def answer(self, server: openai.AsyncOpenAI, question: Question, timeout_s: float) -> dict[str, Any]:
        """Raises Failed. The time limit runs from now; giving up closes the connection, which tells the server."""
        try:
            answer = question.read(self._text(await self._send(server, question, timeout_s)), question.schema)
            if question.validate is not None:
                question.validate(answer)
            return answer
        except UnusableAnswer as error:
            raise self._failed(error.kind, str(error)) from None
        except ValueError as error:  # of `validate`
            raise self._failed("schema", str(error)) from None
        except RecursionError:  # of whatever walks through it
            raise self._failed("not_json", "it is nested too deeply") from None

    async def _send(self, server: openai.AsyncOpenAI, question: Question, timeout_s: float) -> Any:
        """The server's response, of whatever shape. Raises Failed."""
        try:
            # The package's own timeout starts anew with every byte received.
            async with asyncio.timeout(timeout_s):
                return await server.chat.completions.create(**_parameters(self.settings, question), timeout=timeout_s)
        except (TimeoutError, openai.APITimeoutError):
            raise self._failed("timeout", f"no answer in {timeout_s:g} s") from None
        except openai.APIStatusError as error:
            raise self._failed(
                f"http_{error.status_code}",
                error.message,
                retry_after_s=_seconds(error.response.headers.get("retry-after")),
                overloaded=error.status_code in HTTP_OVERLOADED,
            ) from None
        except openai.APIConnectionError as error:
            refused = isinstance(error.__cause__, httpx2.ConnectError)
            raise self._failed("connection", str(error.__cause__ or error), overloaded=refused) from None
        except (openai.OpenAIError, ValueError) as error:
            raise self._failed("not_json", f"the server's response is not JSON: {error}", foreign=True) from None

    def _text(self, answer: Any) -> str:
        """The answer's text. Raises Failed."""
        try:
            choice, usage = answer.choices[0], answer.usage
            finish_reason, text = choice.finish_reason, choice.message.content or ""
            if not isinstance(text, str):
                raise TypeError(f"content of type {type(text).__name__}")
        # The package does not check shapes: a proxy's page arrives as a string, an error object without choices.
        except (AttributeError, LookupError, TypeError):
            detail = f"the server's response is not a chat completion: {answer!r}"
            raise self._failed("not_json", detail, foreign=True) from None
        self.prompt_tokens += _count(usage, "prompt_tokens")
        self.completion_tokens += _count(usage, "completion_tokens")
        if finish_reason == "length":
            remedy = f"raise {YAML_SECTION[self.role]}.max_tokens ({self.settings.max_tokens})"
            raise self._failed("cut", f"the answer hit its token limit; {remedy}")
        return text

    def _failed(self, kind: str, detail: str, **more: Any) -> Failed:
        return Failed(LLMError(self.role, kind, self._present(detail)), **more)


def _parameters(settings: EndpointSettings, question: Question) -> dict[str, Any]:
    """What `create` is given: all of it for servers that know it, less what `leave_out` names."""
    form: dict[str, Any] = {"name": "answer", "schema": question.schema, "strict": True}
    own = {"chat_template_kwargs": {"enable_thinking": settings.thinking}}  # the package does not know it
    parameters = {
        "model": settings.model,
        "messages": [dict(message) for message in question.messages],
        "temperature": settings.temperature,
        settings.max_tokens_name: settings.max_tokens,
        "response_format": {"type": "json_schema", "json_schema": _without(settings.leave_out, form)},
    }
    return _without(settings.leave_out, parameters) | {"extra_body": _without(settings.leave_out, own)}


def _without(names: Sequence[str], parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in parameters.items() if name not in names}


def _seconds(retry_after: str | None) -> float:
    try:
        return max(0.0, finite(retry_after or "0"))
    except ValueError:  # the header may hold a date; our own pauses do then
        return 0.0


def _count(usage: Any, name: str) -> int:
    """A number of tokens, 0 where the server does not tell or tells nonsense."""
    value = getattr(usage, name, 0)
    return value if type(value) is int and value > 0 else 0
