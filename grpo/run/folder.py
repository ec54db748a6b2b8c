"""The folder of a run: who has it, what lies in it, how the run in it went, and how to go on from there.

runs/NAME/run.lock                  while a run is going on: which process
runs/NAME/status.json               steps wanted, warnings, and why the run ended (null: it did not say)
runs/NAME/config.yaml               the settings, overrides applied, without passwords
runs/NAME/system_prompt.txt         what all training prompts begin with, if they do
runs/NAME/environment.json          engine, ranks, device and versions
runs/NAME/metrics.jsonl             one line per step, and one of its own per evaluation
runs/NAME/totals.json               calls, tokens and failures of each role, and the policy's prompt tokens, over the
                                    whole run, evaluations included
runs/NAME/tensorboard/              the same for TensorBoard
runs/NAME/traces/step_00001.jsonl   every conversation of the step, with scores and advantages
runs/NAME/evaluations/step_00000.jsonl
runs/NAME/model/                    the trained Hugging Face folder (checkpoints/step_00010/ before the end)
"""

from __future__ import annotations

import itertools
import json
import shlex
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from grpo.evidence.evaluate import EVALUATION
from grpo.run.disk import whole_file
from grpo.run.folder_lock import LOCK_FILE, FolderLock, Taken

RUN_ENTRIES = frozenset(
    "status.json config.yaml system_prompt.txt environment.json metrics.jsonl totals.json summary.json "
    "tensorboard traces evaluations checkpoints model".split()
)
"""Everything that lies in a run's folder but its lock, and what was being written when a run was killed (.part);
nothing else is ever removed.
"""
FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Weights:
    """A model folder that a run has saved."""

    path: Path
    step: int
    """The last one that trained it."""


class RunFolder:
    def __init__(self, path: Path):
        self.path = path
        self._lock = FolderLock(path)
        self._status: dict[str, Any] | None = None
        """Of the run that this process has begun."""

    # ── whose it is ──

    def take(self) -> str | None:
        """Holds it for this process, from before it is there. Returns a note where that cannot be made sure of.

        Raises ValueError where another run has it, or where it cannot be written.
        """
        try:
            if not self._lock.take():
                return f"{self.path} is on a file system without locks: nothing keeps a second run out of it"
        except Taken as taken:
            raise ValueError(
                f"run.name: a run is going on in {self.path} ({taken}); wait for its end, or choose another run.name"
            ) from None
        except OSError as error:
            raise ValueError(
                f"run.folder: {self.path} cannot be written ({error.strerror}); choose another"
            ) from error
        return None

    def release(self) -> None:
        """Does nothing where it is not held. An empty folder that was made for the run goes with it."""
        self._lock.release()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def holder(self) -> str | None:
        """The run that is going on in it."""
        return self._lock.holder()

    # ── what lies in it ──

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def system_prompt(self) -> Path:
        return self.path / "system_prompt.txt"

    def checkpoint(self, step: int) -> Path:
        return self.path / "checkpoints" / f"step_{step:05}"

    def traces(self, step: int) -> Path:
        return self.path / "traces" / f"step_{step:05}.jsonl"

    def evaluation(self, step: int) -> Path:
        return self.path / "evaluations" / f"step_{step:05}.jsonl"

    @property
    def num_steps(self) -> int:
        """Steps that were trained and recorded."""
        lines = self.metrics.read_bytes().splitlines(keepends=True) if self.metrics.exists() else []
        return sum(line.endswith(b"\n") and EVALUATION.encode() not in line for line in lines)

    def weights(self) -> list[Weights]:
        """What the run has saved, the oldest first. What a run that was killed had only begun to save is none of it."""
        steps = sorted(
            int(path.name.removeprefix("step_"))
            for path in (self.path / "checkpoints").glob("step_[0-9]*")
            if path.suffix != ".part"
        )
        found = [Weights(self.checkpoint(step), step) for step in steps]
        return found + [Weights(self.model, self.num_steps)] * self.model.exists()

    def told(self) -> str:
        """What there is, in words."""
        saved = [one.step for one in self.weights() if one.path != self.model]
        checkpoints = f"{len(saved)} checkpoint{'s' * (len(saved) > 1)} (newest: step {max(saved, default=0)})"
        total = (self.status or {}).get("total_steps")  # folders of older versions have none
        steps = f"{self.num_steps} of {total} steps" if total else f"{self.num_steps} steps"
        return f"{steps}, {checkpoints if saved else 'no checkpoint'}, {'a' if self.model.exists() else 'no'} model"

    def check_free(self, overwrite: bool, inputs: Iterable[Path]) -> str | None:
        """Makes sure a run may be written here. Returns what it will replace, in words.

        Raises ValueError where it may not: the folder holds an earlier run that is not to be replaced, or something
        that is no run (never deleted), or one of the run's own `inputs`.
        """
        for path in inputs:
            if path.resolve().is_relative_to(self.path.resolve()):
                raise ValueError(f"run.name: {self.path} would be emptied, and holds {path}; choose another name")
        found = {entry.name for entry in self.path.iterdir()} - {LOCK_FILE} if self.path.exists() else set()
        if foreign := {name for name in found if name.removesuffix(".part") not in RUN_ENTRIES}:
            raise ValueError(
                f"run.name: {self.path} holds {min(foreign)!r}, so it is no run's folder; choose another"
            )
        if "metrics.jsonl" not in found:
            return None
        if not overwrite:
            newest = self.weights()[-1:]
            going_on = f" (model.path={newest[0].path} goes on from its newest weights)" if newest else ""
            raise ValueError(
                f"run.name: {self.path} holds an earlier run ({self.told()}); choose another run.name{going_on}, or "
                "set run.overwrite=true to delete it"
            )
        return f"replacing {self.path}: {self.told()}; deleted when all models are loaded"

    @property
    def num_bytes(self) -> int:
        """What `empty` would free."""
        files = (path for entry in self._entries() for path in [entry, *entry.rglob("*")])
        return sum(path.stat().st_size for path in files if path.is_file())

    def empty(self) -> None:
        """Removes an earlier run."""
        for path in self._entries():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def _entries(self) -> list[Path]:
        return [self.path / name for entry in RUN_ENTRIES for name in (entry, entry + ".part")]

    # ── how the run went ──

    def begin(self, total_steps: int, warnings: Sequence[str]) -> None:
        self._write_status({"total_steps": total_steps, "warnings": [*warnings], "ended": None})

    def warn(self, warning: str) -> None:
        self._write_status(self._status | {"warnings": [*self._status["warnings"], warning]})

    def end(self, reason: str) -> None:
        """The first reason counts. Does nothing in a process that has begun no run."""
        if self._status and self._status["ended"] is None:
            with suppress(OSError):  # a full disk may be the reason
                self._write_status(self._status | {"ended": reason})

    def _write_status(self, status: dict[str, Any]) -> None:
        with whole_file(self.path / "status.json") as file:
            file.write(json.dumps(status, indent=2, ensure_ascii=False) + "\n")
        self._status = status

    @property
    def status(self) -> dict[str, Any] | None:
        """As `begin` and its like left it; None of a folder without one."""
        file = self.path / "status.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None

    def command_to_go_on(self) -> str | None:
        """The command that trains on from the newest weights; None where the run is finished or has saved none.

        The optimizer begins anew, and another seed draws other prompts.
        """
        weights, status = self.weights(), self.status
        if not weights or status is None or weights[-1].step >= status["total_steps"]:
            return None
        run = yaml.safe_load((self.path / "config.yaml").read_text(encoding="utf-8"))["run"]
        ranks = json.loads((self.path / "environment.json").read_text(encoding="utf-8"))["ranks"]
        names = (f"{run['name']}-{number}" for number in itertools.count(2))
        name = next(name for name in names if not self.path.with_name(name).exists())
        python = "python" if ranks == 1 else f"torchrun --nproc_per_node {ranks}"
        arguments = [
            *("-m", "launch.train", "--config", str(self.path / "config.yaml")),
            f"model.path={weights[-1].path}",
            f"run.name={name}",
            f"run.steps={status['total_steps'] - weights[-1].step}",
            f"run.seed={run['seed'] + 1}",
        ]
        return f"{python} {shlex.join(arguments)}"
