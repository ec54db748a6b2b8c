"""An event loop in a thread of its own: conversations go on there while the main thread trains."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from rollout.cores import leave_cores

T = TypeVar("T")


class LoopThread:
    """All coroutines of a run share this loop, and so do their HTTP clients. The end cancels what still runs."""

    def __enter__(self) -> LoopThread:
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="conversations", daemon=True)
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Starts it and waits for its result."""
        return wait_for(self.start(coroutine))

    def _serve(self) -> None:
        with asyncio.Runner() as runner:
            self._loop, self._closing = runner.get_loop(), asyncio.Event()
            self._ready.set()
            runner.run(self._closing.wait())


def wait_for(future: Future[T]) -> T:
    """The result of what was started; the engine has the cores meanwhile. Raises what the coroutine raised."""
    leave_cores()
    return future.result()
