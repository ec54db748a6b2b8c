"""How coroutines share an engine: nobody waits for an event loop, nobody is left behind."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from rollout.engines.interface import Sampled, SampleRequest
from rollout.engines.sharing import SharedEngine


class Counting:
    """An engine that finishes every request at its second step, with its own key as the only token."""

    name = "counting"
    max_context_tokens = 100

    def __init__(self):
        self.running: dict[int, int] = {}
        self.added: list[tuple[int, ...]] = []
        self.num_steps = self.num_aborts = 0
        self.fault: Exception | None = None
        self.gate = threading.Event()
        """Steps wait until it is set."""
        self.gate.set()

    def enter_thread(self):
        self.thread = threading.current_thread()

    def add(self, key, request):
        self.added.append(request.prompt_ids)
        self.running[key] = 0

    def step(self):
        assert threading.current_thread() is self.thread
        self.gate.wait()
        self.num_steps += 1
        if self.fault:
            raise self.fault
        self.running = {key: steps + 1 for key, steps in self.running.items()}
        done = [key for key, steps in self.running.items() if steps == 2]
        for key in done:
            del self.running[key]
        return [(key, Sampled((key,), (0.0,), "stop", num_cached_tokens=1)) for key in done]

    def abort_all(self):
        self.num_aborts += 1
        self.running.clear()

    def close(self): ...


@pytest.fixture
def shared():
    shared = SharedEngine(Counting())
    yield shared
    shared.engine.gate.set()
    shared.close()


def request(*prompt_ids):
    return SampleRequest(prompt_ids, 5, 1.0, seed=0)


def test_requests_that_wait_together_are_queued_by_how_their_prompts_begin(shared):
    async def ask():
        prompts = [(1, 2), (3, 4), (1, 2, 9), (3, 5), (1, 2)]
        await asyncio.gather(*(shared.sample(request(*prompt)) for prompt in prompts))

    asyncio.run(ask())
    assert shared.engine.added == [(1, 2), (1, 2), (1, 2, 9), (3, 4), (3, 5)]
    assert shared.engine.num_steps == 2  # one batch, though five asked


def test_prompt_tokens_found_in_the_cache_are_counted(shared):
    async def ask():
        await asyncio.gather(shared.sample(request(1, 2, 3)), shared.sample(request(1, 2, 4, 5)))

    asyncio.run(ask())
    assert (shared.num_prompt_tokens, shared.num_cached_tokens, shared.num_tokens) == (7, 2, 2)


def test_an_event_loop_that_is_busy_does_not_keep_the_engine_waiting(shared):
    async def ask():
        reply = asyncio.create_task(shared.sample(request(1)))
        while not shared.engine.added:
            await asyncio.sleep(0)
        while shared.engine.num_steps < 2:  # never gives the loop its turn
            time.sleep(0.001)
        return await reply

    assert asyncio.run(ask()).token_ids == (0,)


def test_a_request_joins_those_that_run(shared):
    async def ask():
        shared.engine.gate.clear()
        first = asyncio.create_task(shared.sample(request(1)))
        while not shared.engine.added:
            await asyncio.sleep(0)
        second = asyncio.create_task(shared.sample(request(2)))
        await asyncio.sleep(0)
        shared.engine.gate.set()
        await asyncio.gather(first, second)

    asyncio.run(ask())
    assert shared.engine.num_steps == 3  # of two steps each, one step apart


def test_what_the_engine_raises_reaches_all_who_wait_and_the_next_are_served(shared):
    async def ask():
        shared.engine.fault = RuntimeError("out of memory")
        outcomes = await asyncio.gather(*(shared.sample(request(n)) for n in range(3)), return_exceptions=True)
        assert [str(outcome) for outcome in outcomes] == ["out of memory"] * 3
        shared.engine.fault = None
        return await shared.sample(request(7))

    assert asyncio.run(ask()).token_ids == (3,)
    assert shared.engine.num_aborts == 1


def test_an_engine_that_cannot_even_be_given_requests_fails_all_of_them(shared):
    def add(key, request):
        raise RuntimeError("no room")

    async def ask():
        return await asyncio.gather(*(shared.sample(request(n)) for n in range(3)), return_exceptions=True)

    shared.engine.add = add
    shared.engine.abort_all = lambda: 1 / 0  # a broken engine may refuse that too
    assert [str(outcome) for outcome in asyncio.run(asyncio.wait_for(ask(), 20))] == ["no room"] * 3


def test_replies_that_nobody_waits_for_are_aborted(shared):
    async def ask():
        shared.engine.gate.clear()
        waiting = [asyncio.create_task(shared.sample(request(n))) for n in range(2)]
        while len(shared.engine.added) < 2:
            await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        shared.engine.gate.set()

    asyncio.run(ask())
    end = time.monotonic() + 20
    while (shared.engine.running or not shared.engine.num_aborts) and time.monotonic() < end:  # the engine's thread ends its step first
        time.sleep(0.01)
    assert shared.engine.num_aborts == 1 and not shared.engine.running
    assert asyncio.run(shared.sample(request(5))).token_ids == (2,)  # in another event loop
