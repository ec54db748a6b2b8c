"""A server of known speed, and a clock that jumps over the waiting: hours of load in seconds, the same every time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import httpx2
import openai
import pytest

from rollout.roles.endpoints import Address


class _Jumps(selectors.DefaultSelector):
    """Where nothing is ready, it is later."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        self.now += timeout or 0.0
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    def time(self) -> float:
        return self._jumps.now


def in_virtual_time(coroutine: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(coroutine)


class SlowServer:
    """Answers `slots` questions at once, each in `seconds`, which grow by `factor` after `slow_down_after` answers. More
    wait in line (or get 503, where it `refuses` them), and leave it when nobody waits for their answer any longer.

    While it is `gone` it refuses connections, and loses those it had. To the question HANGS it never has an answer.
    `answered` counts the answers, `needed_s` the seconds that they took of the whole server, at best.
    """

    HANGS = "hang"

    def __init__(
        self,
        slots: int,
        seconds: float,
        *,
        refuses: bool = False,
        slow_down_after: float = float("inf"),
        factor: float = 1.0,
    ):
        self.slots, self.seconds, self.refuses = slots, seconds, refuses
        self.slow_down_after, self.factor = slow_down_after, factor
        self.gone = False
        self.asked = self.answered = 0
        self.needed_s = 0.0
        self._free = asyncio.Semaphore(slots)

    async def create(self, *, messages: list[dict[str, str]], **_: Any) -> Any:
        """In the place of `openai.AsyncOpenAI().chat.completions.create`."""
        self.asked += 1
        request = httpx2.Request("POST", "http://judge")
        if messages[0]["content"] == self.HANGS:
            await asyncio.Event().wait()
        if self.gone:
            raise openai.APIConnectionError(request=request) from httpx2.ConnectError("refused")
        if self.refuses and self._free.locked():
            raise openai.InternalServerError("busy", response=httpx2.Response(503, request=request), body=None)
        async with self._free:
            seconds = self.seconds * (self.factor if self.answered >= self.slow_down_after else 1.0)
            await asyncio.sleep(seconds)
        if self.gone:
            raise openai.APIConnectionError(request=request) from httpx2.ReadError("lost")
        self.answered += 1
        self.needed_s += seconds / self.slots
        message = SimpleNamespace(content='{"score": 0.5}')
        return SimpleNamespace(choices=[SimpleNamespace(finish_reason="stop", message=message)], usage=None)

    def stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """For every address."""

        async def close() -> None: ...

        completions = SimpleNamespace(completions=self)
        monkeypatch.setattr(Address, "server", SimpleNamespace(chat=completions, close=close))
