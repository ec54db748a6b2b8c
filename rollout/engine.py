"""What every generation engine offers, which one a run takes, and how coroutines share it.

Engines generate from exact token ids and give back exact token ids with the log-prob of each, of the
tempered distribution. They are stepped by one thread of their own (`SharedEngine`), so that replies
are generated while other conversations wait for their user.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch

from rollout.cores import leave_cores, take_cores
from rollout.settings import EngineSettings, without_password

Weights = Iterator[tuple[str, torch.Tensor]]
"""(name, whole tensor), named as `Engine.takes_stored` says; every engine consumes it to the end."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    """0 takes the most likely token."""
    seed: int


@dataclass(frozen=True, slots=True)
class Sampled:
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Nats, of the tempered distribution, one per token."""
    finish_reason: Literal["stop", "length"]
    num_cached_tokens: int = 0
    """Of the prompt: those the engine did not compute again."""


class Engine(Protocol):
    name: str
    takes_stored: bool
    """Whether it knows weights by their names in the model's files, or by those of transformers' model in memory."""
    max_context_tokens: int

    def enter_thread(self) -> None:
        """Called once in the thread that will step the engine."""

    def add(self, key: int, request: SampleRequest) -> None:
        """Queues a request."""

    def step(self) -> list[tuple[int, Sampled]]:
        """Does one unit of work; gives the requests that it finished."""

    def abort_all(self) -> None:
        """Forgets every queued and running request."""

    def push_weights(self, weights: Weights) -> None:
        """Loads new weights, drops every cache and, where it slept, wakes."""

    def fingerprint(self) -> list[tuple[tuple[str, ...], float | None]]:
        """(names, `weight_mark`) of what it computes with; a fused weight has several names, and one whose layout is a
        kernel's own has no mark."""

    def sleep(self) -> None:
        """Frees device memory until the next push; nothing happens where there is none to free."""

    def close(self) -> None: ...


def weight_mark(tensor: torch.Tensor) -> float:
    """A number that is the same for the same weight: the exact sum of its first column (or of a vector), in whatever
    order and on however many threads it is added up.

    The first column, because it is what a linear layer answers to the unit vector (1, 0, 0, …): so an
    engine that keeps its matrices packed in a kernel's own layout can be asked for it, exactly.
    """
    values = (tensor if tensor.ndim < 2 else tensor.flatten(1)[:, 0]).double()
    return math.fsum(values.tolist()) if values.isfinite().all() else values.sum().item()


def choose_engine(settings: EngineSettings) -> tuple[Literal["vllm", "transformers", "remote"], str]:
    """The engine `settings.kind` stands for, and why. Raises ValueError where it cannot be had."""
    if settings.kind == "remote":
        return "remote", f"vLLM at {without_password(settings.base_url)}"
    missing = importlib.util.find_spec("vllm") is None
    if settings.kind == "vllm" and missing:
        raise ValueError(
            "engine.kind: vllm is not installed; pip install -e '.[gpu]' (or, on a CPU, bash launch/setup.sh), "
            "or set engine.kind=transformers"
        )
    if settings.kind == "transformers":
        return "transformers", "as configured"
    return ("transformers", "vLLM is not installed") if missing else ("vllm", "vLLM is installed")


def build_engine(
    settings: EngineSettings, model_folder: Path, dtype: torch.dtype, device: torch.device, stop_ids: tuple[int, ...]
) -> Engine:
    """Starts the engine of this rank; its first weights are those of `model_folder`."""
    kind, _ = choose_engine(settings)
    if kind == "vllm":
        from rollout.engine_vllm import VLLMEngine

        return VLLMEngine(settings, model_folder, dtype, device, stop_ids)
    if kind == "remote":
        from rollout.engine_remote import RemoteEngine

        return RemoteEngine(settings, stop_ids)
    from rollout.engine_transformers import TransformersEngine

    return TransformersEngine(settings, model_folder, dtype, device, stop_ids)


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
