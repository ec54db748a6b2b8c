"""How coroutines share an engine: a thread of its own steps it, so that replies are generated while other conversations
wait for their user.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from concurrent.futures import ThreadPoolExecutor

from rollout.cores import leave_cores, take_cores
from rollout.engines.interface import Engine, Sampled, SampleRequest


class SharedEngine:
    """Lets any number of coroutines sample from one engine.

    A thread of its own steps the engine while at least one of them waits, and takes in between two steps what has
    arrived: an event loop that is busy with its coroutines never keeps the engine waiting.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self.num_tokens = 0
        """Tokens sampled so far."""
        self.num_prompt_tokens = 0
        """Tokens of the prompts answered so far."""
        self.num_cached_tokens = 0
        """Those of them that the engine had computed for another prompt or reply; 0 for an engine without a cache."""
        self._thread = ThreadPoolExecutor(1, "engine")
        self._thread.submit(engine.enter_thread).result()
        self._arrived: deque[tuple[SampleRequest, asyncio.Future[Sampled]]] = deque()
        self._keys = itertools.count()
        leave_cores()  # this thread loaded the engine's model

    async def sample(self, request: SampleRequest) -> Sampled:
        """Raises what the engine raised, in every coroutine that waits for it."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._arrived.append((request, future))
        # Not before the other coroutines that are ready have asked too: an engine of whole batches wants them together.
        loop.call_soon(self._thread.submit, self._serve)
        return await future

    def _serve(self) -> None:
        """Runs the engine until no request is pending; finds nothing to do if an earlier call served this request."""
        waiting: dict[int, tuple[SampleRequest, asyncio.Future[Sampled]]] = {}
        try:
            while True:
                self._take_in(waiting)
                if all(future.done() for _, future in waiting.values()):  # cancelled, or there is none
                    break
                finished = []
                take_cores()
                for key, sampled in self.engine.step():
                    request, future = waiting.pop(key)
                    self.num_tokens += len(sampled.token_ids)
                    self.num_prompt_tokens += len(request.prompt_ids)
                    self.num_cached_tokens += sampled.num_cached_tokens
                    finished.append((future, sampled))
                _deliver(finished)
            if waiting:
                self.engine.abort_all()
        except Exception as error:
            _deliver([(future, error) for _, future in waiting.values()])
            self.engine.abort_all()  # last, since after a fault it may fail too
        finally:
            leave_cores()

    def _take_in(self, waiting: dict[int, tuple[SampleRequest, asyncio.Future[Sampled]]]) -> None:
        arrived = [self._arrived.popleft() for _ in range(len(self._arrived))]
        # Prompts that begin alike follow each other, so that an engine with a prefix cache computes the beginning once.
        new = {next(self._keys): item for item in sorted(arrived, key=lambda item: item[0].prompt_ids)}
        waiting |= new  # before any is added: where that fails, all of them are told
        for key, (request, _) in new.items():
            self.engine.add(key, request)

    def close(self) -> None:
        self._thread.shutdown()
        self.engine.close()


def _deliver(outcomes: list[tuple[asyncio.Future[Sampled], Sampled | Exception]]) -> None:
    """Wakes, from the engine's thread, the coroutines that still wait: all together."""
    waited_for = [(future, outcome) for future, outcome in outcomes if not future.done()]
    if waited_for:
        waited_for[0][0].get_loop().call_soon_threadsafe(_settle, waited_for)


def _settle(outcomes: list[tuple[asyncio.Future[Sampled], Sampled | Exception]]) -> None:
    for future, outcome in outcomes:
        if future.done():  # cancelled meanwhile
            continue
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
