"""What benches share: batch, settings and meter of both systems of `bench_update`, and prompts to talk about."""

from __future__ import annotations

import ctypes
import gc
import re
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig

from rollout.chat import Chat
from rollout.types import Reply, Scenario

TEMPERATURE, KL_COEF, LR, MAX_GRAD_NORM = 0.8, 0.04, 1e-6, 1.0
TOKENS_PER_FORWARD = 4096
"""Of both systems, padding included: what is left decides the size of a micro-batch."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A batch: every prompt and every reply of one length, which spares TRL its padding."""

    prompts: int
    prompt_tokens: int
    group_size: int
    reply_tokens: int

    @property
    def num_replies(self) -> int:
        return self.prompts * self.group_size

    @property
    def response_tokens(self) -> int:
        return self.num_replies * self.reply_tokens

    @property
    def tokens(self) -> int:
        """Each prompt once, each reply once."""
        return self.prompts * self.prompt_tokens + self.response_tokens


class Meter:
    """Seconds and memory from `start` to `stop`; `last` holds the latest."""

    def start(self, *, trim: bool = False) -> None:
        """`trim`: freed memory goes back to the system first, so that it does not count, at a cost in seconds."""
        gc.collect()
        if trim:
            ctypes.CDLL(None).malloc_trim(0)
        self._resident = _status_gib("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        self._started = time.perf_counter()

    def stop(self) -> None:
        seconds, peak = time.perf_counter() - self._started, _status_gib("VmHWM")
        self.last = {"seconds": seconds, "peak_gib": peak, "peak_above_state_gib": peak - self._resident}


def _status_gib(field: str) -> float:
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 2**20


def memory_of(meter: Meter) -> dict[str, float]:
    return {name: meter.last[name] for name in ("peak_gib", "peak_above_state_gib")}


def matrix_rate() -> float:
    """Floating-point operations per second of the best of ten float32 products of 2,048 x 2,048 matrices."""
    a, b, best = torch.randn(2048, 2048), torch.randn(2048, 2048), float("inf")
    for _ in range(10):
        start = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - start)
    return 2 * 2048**3 / best


def fixed_replies(model: Path, shape: Shape) -> list[list[Reply]]:
    """[prompts][group_size] made-up replies, always the same."""
    generator = torch.Generator().manual_seed(5)
    vocabulary = AutoConfig.from_pretrained(model).vocab_size

    def draw(number: int) -> tuple[int, ...]:
        return tuple(torch.randint(100, vocabulary, (number,), generator=generator).tolist())

    prompts = [draw(shape.prompt_tokens) for _ in range(shape.prompts)]
    sampler = (-10.0,) * shape.reply_tokens  # only reported
    return [
        [Reply(prompt, draw(shape.reply_tokens), sampler, "", "length") for _ in range(shape.group_size)]
        for prompt in prompts
    ]


def group_rewards(shape: Shape) -> list[float]:
    """0, 1, 2 ...: of an even number of replies, none is at the mean."""
    return [float(sample) for sample in range(shape.group_size)]


def prompt_texts(model: Path, shape: Shape) -> list[str]:
    """One user message per prompt that the chat template makes exactly `prompt_tokens` tokens of."""
    chat, texts = Chat.load(model), []
    for topic in ("bees", "trains", "rivers", "bridges")[: shape.prompts]:
        text = f"Can you help me write an article about {topic}? I want it to be"
        missing = shape.prompt_tokens - len(chat.prompt_ids([{"role": "user", "content": text}]))
        texts.append(text + " very" * (missing - 2) + " long.")
        length = len(chat.prompt_ids([{"role": "user", "content": texts[-1]}]))
        if length != shape.prompt_tokens:
            raise ValueError(f"{model}: the prompt came to {length} tokens, not {shape.prompt_tokens}")
    return texts


def scenarios(number: int) -> list[Scenario]:
    subjects = "bees bread bridges clocks comets dyes ferries glass kites lace maps mills owls paper salt tides".split()
    return [
        Scenario(
            scenario_id=f"bench/{row}",
            messages=(
                {"role": "system", "content": "You help people to write. Ask what they want before you write it."},
                {"role": "user", "content": f"I need some help with a short piece about {subjects[row % 16]}."},
            ),
            goal="",
            task_desc="",
            reference=None,
            data_source="bench",
            row=row,
        )
        for row in range(number)
    ]
