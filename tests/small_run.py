"""A training run of a tiny model as its user starts it: `python -m launch.train` in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from grpo.run.recorder import read_steps
from tests.fake_endpoint import MODEL
from tests.tiny import make_model
from tests.torchrun import QUIET

PROMPTS = [f"hello what do you say about the {word} ?" for word in ("bees", "roof", "winter", "help")]


def prepare(folder: Path, user: str | None = None, **changes: Any) -> Path:
    """Writes model, data and config.yaml of a run named `run`; `user` is the address of the simulated user's server.

    `changes` are `section__key=value`.
    """
    make_model(folder / "model")
    rows = [{"prompt": prompt, "reference": "the bees hum .", "goal": "the bees"} for prompt in PROMPTS]
    for name in ("rows.jsonl", "held_out.jsonl"):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    endpoint = {"base_url": user, "model": MODEL, "max_attempts": 2, "max_tokens": 64}
    config: dict[str, Any] = {
        "run": {"name": "run", "folder": str(folder), "steps": 2},
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"train": str(folder / "rows.jsonl")},
        "engine": {"kind": "transformers", "max_context_tokens": 192},
        "rollout": {
            "prompts_per_step": 2,
            "group_size": 4,
            "continuations": 1,
            "max_reply_tokens": 64,
            "max_user_turns": 1,
            "max_assistant_turns": 2,
            "user": {"kind": "llm", "endpoint": endpoint} if user else {"kind": "scripted"},
        },
        "rewards": {"weights": {"token_amount": -1.0}, "truncated": "score"},
        "optimizer": {"lr": 1e-3},
        "deepspeed": {"stage": 0},
    }
    for name, value in changes.items():
        *sections, last = name.split("__")
        inner = config
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


class SmallRun:
    """`python -m launch.train` as a process, under torchrun where there are several ranks. Kills what is left of it."""

    def __init__(self, config: Path, num_ranks: int = 1, *, module: str = "launch.train", **environment: str):
        torchrun = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks), "-m"]
        self.folder = config.parent / "run"
        self._output = config.parent / "output.txt"
        self._mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [sys.executable, "-m", *(torchrun if num_ranks > 1 else []), module, "--config", str(config)],
            env=os.environ | QUIET | {"CUDA_VISIBLE_DEVICES": ""} | environment | {"SMALL_RUN": self._mark},
            stdout=self._output.open("wb"),
            stderr=subprocess.STDOUT,
        )

    def __enter__(self) -> SmallRun:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Of its steps."""
        return read_steps(self.folder / "metrics.jsonl")

    def wait_until(self, happened: Callable[[], bool], timeout: float = 400) -> None:
        end = time.monotonic() + timeout
        while not happened():
            assert self.process.poll() is None and time.monotonic() < end, self.output
            time.sleep(0.02)

    def wait(self, timeout: float = 400) -> int:
        """Its exit code."""
        return self.process.wait(timeout)

    def processes(self) -> list[int]:
        """All that the run started and that still live, itself included: they inherit its environment."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self._mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except (PermissionError, FileNotFoundError, ProcessLookupError):
                pass  # another user's, or gone
        return found
