"""Room for what a run writes, and files that are whole or absent."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from grpo.config import Config

BYTES_PER_PARAMETER = {"float32": 4, "bfloat16": 2}
ROW_BYTES, BYTES_PER_TOKEN = 2048, 1
"""Of a trace row: names and scores, and its text. A token has about four letters, and conversations fill about a
quarter of the context on average.
"""


class NotWritten(RuntimeError):
    """The system did not take what a run wrote: the disk is full, over its quota, read-only or gone."""


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """A file to write, which is whole or absent at `path` whenever the process ends; no part stays behind a fault."""
    part = path.with_name(path.name + ".part")
    try:
        # A lone surrogate, which some models emit, becomes its own JSON escape.
        with part.open("w", encoding="utf-8", errors="backslashreplace") as file:
            yield file
        part.rename(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def flush_folder(folder: Path) -> None:
    """Has the system write `folder`'s files out. Network file systems tell only then that there was no room."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def free_bytes(folder: Path) -> int:
    """Free for us on the file system that `folder` is on. Quotas are not seen."""
    return shutil.disk_usage(folder).free


def in_words(num_bytes: int) -> str:
    """In the unit that suits it, such as 7.5 GiB."""
    unit, size = next((u, 2**p) for u, p in (("GiB", 30), ("MiB", 20), ("KiB", 10)) if num_bytes >= 2**p or p == 10)
    return f"{num_bytes / size:.1f} {unit}"


def saved_model_bytes(folder: Path, dtype: str) -> int:
    """What the model in `folder` takes when it is saved in `dtype`, its tokenizer included."""
    num_bytes = 0
    for path in folder.iterdir():
        if path.match("model*.safetensors"):
            num_bytes += sum(_tensor_bytes(path, dtype))
        elif path.suffix in (".json", ".txt", ".model", ".jinja"):
            num_bytes += path.stat().st_size
    return num_bytes


def _tensor_bytes(file: Path, dtype: str) -> Iterator[int]:
    """From the header: its length in 8 bytes, then names, types and places as JSON."""
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        begin, end = tensor["data_offsets"]
        bits = int("".join(filter(str.isdigit, tensor["dtype"].partition("_")[0])) or 8)  # F32, BF16, F8_E4M3, BOOL
        yield (end - begin) * 8 // bits * BYTES_PER_PARAMETER[dtype] if "F" in tensor["dtype"] else end - begin


def check_space(config: Config, total_steps: int, freed: int) -> str | None:
    """Makes sure that the trained model and the traces fit. Returns a note where the checkpoints before do not.

    `freed`: bytes of the earlier run that makes way. Raises ValueError naming what is needed and what is free.
    """
    folder, run = config.run.path, config.run
    model = saved_model_bytes(config.model.path, config.model.dtype)
    num_rows = config.rollout.prompts_per_step * config.rollout.group_size * max(config.rollout.continuations, 1)
    row = ROW_BYTES + BYTES_PER_TOKEN * config.engine.max_context_tokens
    traces = total_steps * num_rows * row
    free = free_bytes(folder) + freed
    there = f"{folder} has {in_words(free)} free" + (", the earlier run's included" if freed else "")
    if model + traces > free:
        raise ValueError(
            f"run.folder: the model as it will be saved takes {in_words(model)} and the traces about "
            f"{in_words(traces)}; {there}. Make room, or name another run.folder"
        )
    num_checkpoints = (total_steps - 1) // run.save_every if run.save_every else 0
    needed = (num_checkpoints + 1) * model + traces
    if needed > free:
        return (
            f"run.save_every: {run.save_every} makes {num_checkpoints} checkpoints; with the model and the traces they "
            f"take about {in_words(needed)}, and {there}. The run ends at the one that does not fit: make room, or "
            "save less often"
        )
    return None
