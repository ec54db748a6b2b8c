"""What every generation engine offers.

Engines generate from exact token ids and give back exact token ids with the log-prob of each, of the tempered
distribution.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

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
