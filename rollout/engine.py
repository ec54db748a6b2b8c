"""What every generation engine offers, which one a run takes, and how coroutines share it.

Engines generate from exact token ids and give back exact token ids with the log-prob of each, of the
tempered distribution. They are stepped by one thread of their own (`SharedEngine`), so that replies
are generated while other conversations wait for their user.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch

from rollout.settings import EngineSettings

Weights = Iterator[tuple[str, torch.Tensor]]
"""(name in the Hugging Face checkpoint, whole tensor); every engine consumes it to the end."""


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


class Engine(Protocol):
    name: str
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

    def fingerprint(self) -> list[tuple[tuple[str, ...], float]]:
        """(checkpoint names, `weight_mark`) of what it computes with; a fused weight has several names."""

    def sleep(self) -> None:
        """Frees device memory until the next push; nothing happens where there is none to free."""

    def close(self) -> None: ...


def weight_mark(tensor: torch.Tensor) -> float:
    """A number that changes whenever a weight is trained: the float64 sum of its first column (or of a vector).

    The first column, because it is what a linear layer answers to the unit vector (1, 0, 0, …): so an
    engine that keeps its matrices packed in a kernel's own layout can be asked for it, exactly.
    """
    return (tensor if tensor.ndim == 1 else tensor.flatten(1)[:, 0]).double().sum().item()


def choose_engine(settings: EngineSettings) -> tuple[Literal["vllm", "transformers"], str]:
    """The engine `settings.kind` stands for, and why. Raises ValueError where it cannot be had."""
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
    from rollout.engine_transformers import TransformersEngine

    return TransformersEngine(settings, model_folder, dtype, device, stop_ids)


class SharedEngine:
    """Lets any number of coroutines sample from one engine; it steps while at least one waits."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.num_tokens = 0
        """Tokens sampled so far."""
        self._thread = ThreadPoolExecutor(1, "engine", initializer=engine.enter_thread)
        self._waiting: list[tuple[int, SampleRequest]] = []
        self._futures: dict[int, asyncio.Future[Sampled]] = {}
        self._next_key = 0
        self._stepping: asyncio.Task[None] | None = None

    async def sample(self, request: SampleRequest) -> Sampled:
        """Raises what the engine raised, in every coroutine that waits for it."""
        key, self._next_key = self._next_key, self._next_key + 1
        future = asyncio.get_running_loop().create_future()
        self._futures[key] = future
        self._waiting.append((key, request))
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step_until_idle())
        return await future

    async def _step_until_idle(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._futures:
                for key, request in self._waiting:
                    self.engine.add(key, request)
                self._waiting.clear()
                for key, sampled in await loop.run_in_executor(self._thread, self.engine.step):
                    self.num_tokens += len(sampled.token_ids)
                    future = self._futures.pop(key)
                    if not future.done():
                        future.set_result(sampled)
        except BaseException as error:
            waiting, self._futures = self._futures, {}
            self._waiting.clear()
            self.engine.abort_all()
            for future in waiting.values():
                if not future.done():
                    future.set_exception(error)
            if not isinstance(error, Exception):
                raise

    def close(self) -> None:
        self._thread.shutdown()
        self.engine.close()
