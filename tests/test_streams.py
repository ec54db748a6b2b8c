"""The engine's own CUDA stream. Where there is no GPU there is none, and the calls do nothing."""

from __future__ import annotations

import threading

import pytest
import torch

from rollout.engines.streams import EngineStream

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_without_a_gpu_nothing_of_cuda_is_asked_for(monkeypatch):
    for name in ("current_stream", "set_stream", "synchronize", "set_device", "Stream"):
        monkeypatch.delattr(torch.cuda, name)
    stream = EngineStream(torch.device("cpu"))
    stream.enter()
    with stream.current(), stream.handed_over():
        pass


@needs_gpu
def test_the_engines_thread_has_the_stream_and_the_trainers_gets_its_own_back():
    device = torch.device("cuda", 0)
    before, stream = torch.cuda.current_stream(device), EngineStream(device)
    with stream.current():
        own = torch.cuda.current_stream(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))  # as an engine may, while it is built
    assert torch.cuda.current_stream(device) == before != own
    seen = []

    def engine():
        stream.enter()
        seen.append(torch.cuda.current_stream(device))

    thread = threading.Thread(target=engine)
    thread.start()
    thread.join()
    assert seen == [own] and torch.cuda.current_stream(device) == before


@needs_gpu
def test_weights_are_written_after_what_reads_them_and_before_what_reads_them_next():
    device = torch.device("cuda", 0)
    stream, weight = EngineStream(device), torch.zeros(1, device=device)
    with stream.current():
        reader = torch.cuda.current_stream(device)
    with torch.cuda.stream(reader):
        torch.cuda._sleep(200_000_000)  # cycles: a long reply
        old = weight.clone()
    with stream.handed_over():
        torch.cuda._sleep(200_000_000)
        weight.fill_(1)
    with torch.cuda.stream(reader):
        new = weight.clone()
    torch.cuda.synchronize(device)
    assert (old.item(), new.item()) == (0, 1)
