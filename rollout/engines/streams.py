"""The engine computes on a CUDA stream of its own, so that it samples while the trainer's stream updates.

Kernels of one stream run in turn, those of two at once: so what the trainer's thread writes and the engine's reads,
the weights, needs an order. Without a GPU there are no streams, and nothing happens here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class EngineStream:
    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def enter(self) -> None:
        """Makes it the calling thread's stream for good: the engine's thread computes on nothing else. What others were
        asked for before, as loading the engine, is done by then.
        """
        if self._stream:
            torch.cuda.set_device(self._device)
            torch.cuda.synchronize(self._device)
            torch.cuda.set_stream(self._stream)

    @contextmanager
    def current(self) -> Iterator[None]:
        """The calling thread's stream meanwhile, and afterwards done: for an engine that is built by the trainer's
        thread. The trainer's own stream comes back, whichever the engine has made current.

        A trainer that stayed on the engine's stream would wait for it, and share its workspaces: scratch memory of
        matrix products, which CUDA graphs keep using.
        """
        if not self._stream:
            yield
            return
        before = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(before)
        torch.cuda.set_stream(self._stream)
        try:
            yield
        finally:
            torch.cuda.synchronize(self._device)
            torch.cuda.set_stream(before)

    @contextmanager
    def handed_over(self) -> Iterator[None]:
        """The calling thread writes what the engine reads: after all that the engine was asked for, and before what it
        is asked next.
        """
        if not self._stream:
            yield
            return
        writer = torch.cuda.current_stream(self._device)
        writer.wait_stream(self._stream)
        yield
        self._stream.wait_stream(writer)
