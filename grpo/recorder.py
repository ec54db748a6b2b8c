"""What a run leaves behind: metrics, TensorBoard, traces, evaluations. Only the main rank writes.

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

import json
import math
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from torch.utils.tensorboard import SummaryWriter

from grpo.config import Config
from grpo.evaluate import EVALUATION, Evaluation

RUN_ENTRIES = frozenset(
    "config.yaml system_prompt.txt environment.json metrics.jsonl totals.json summary.json "
    "tensorboard traces evaluations checkpoints model model.part".split()
)
"""Everything that lies in a run's folder; nothing else is ever removed."""


class RunFolder:
    def __init__(self, config: Config):
        self.path = config.run.folder / config.run.name
        self.metrics = self.path / "metrics.jsonl"

    def check_free(self, overwrite: bool, inputs: Iterable[Path]) -> None:
        """Makes sure a run may be written here. Raises ValueError where it may not:

        the folder holds an earlier run that is not to be replaced, or something that is no run (never
        deleted), cannot be written, or holds one of the run's own `inputs`.
        """
        for path in inputs:
            if path.resolve().is_relative_to(self.path.resolve()):
                raise ValueError(f"run.name: {self.path} would be emptied, and holds {path}; choose another name")
        try:
            found = {entry.name for entry in self.path.iterdir()} if self.path.exists() else set()
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / "environment.json.part").touch()
            (self.path / "environment.json.part").unlink()
        except OSError as error:
            raise ValueError(f"run.folder: {self.path} cannot be written ({error.strerror}); choose another") from error
        if found and not found <= RUN_ENTRIES:
            raise ValueError(
                f"run.name: {self.path} holds {min(found - RUN_ENTRIES)!r}, so it is no run's folder; choose another"
            )
        if "metrics.jsonl" in found and not overwrite:
            raise ValueError(
                f"run.name: {self.path} holds an earlier run; choose another run.name, or set run.overwrite=true "
                "to replace it"
            )

    def empty(self) -> None:
        """Removes an earlier run."""
        for name in RUN_ENTRIES:
            path = self.path / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def system_prompt(self) -> Path:
        return self.path / "system_prompt.txt"

    def checkpoint(self, step: int) -> Path:
        return self.path / "checkpoints" / f"step_{step:05}"

    def traces(self, step: int) -> Path:
        return self.path / "traces" / f"step_{step:05}.jsonl"

    def evaluation(self, step: int) -> Path:
        return self.path / "evaluations" / f"step_{step:05}.jsonl"


class Recorder:
    """Writes into a run's folder, which it empties first; every line is on disk before the next step."""

    def __init__(self, folder: RunFolder, config: Config, environment: Mapping[str, Any], system_prompt: str | None):
        """`system_prompt`: what all training prompts begin with, which talking to the model needs too."""
        self.folder = folder
        folder.empty()
        for name in ("traces", "evaluations", "checkpoints"):
            (folder.path / name).mkdir(parents=True)
        values = config.model_dump(mode="json")
        text = yaml.safe_dump(values, sort_keys=False)
        (folder.path / "config.yaml").write_text(text, encoding="utf-8")
        (folder.path / "environment.json").write_text(json.dumps(environment, indent=2) + "\n", encoding="utf-8")
        if system_prompt is not None:
            folder.system_prompt.write_text(system_prompt, encoding="utf-8")
        self._tensorboard = SummaryWriter(folder.path / "tensorboard")

    def step(self, step: int, metrics: Mapping[str, float], traces: Iterable[dict[str, Any]]) -> None:
        write_rows(self.folder.traces(step), traces)
        self._metrics(step, metrics)

    def _metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        with self.folder.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step} | {name: _finite(value) for name, value in metrics.items()}) + "\n")
        for name, value in metrics.items():
            self._tensorboard.add_scalar(name, value, step)
        self._tensorboard.flush()

    def evaluation(self, evaluation: Evaluation) -> None:
        write_rows(self.folder.evaluation(evaluation.step), evaluation.rows)
        self._metrics(evaluation.step, evaluation.metrics())

    def close(self, totals: Mapping[str, float]) -> None:
        (self.folder.path / "totals.json").write_text(json.dumps(totals, indent=2) + "\n", encoding="utf-8")
        self._tensorboard.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file. Raises ValueError naming file and line where one is not JSON."""
    rows = []
    # Not splitlines: a row may hold characters that it takes for line ends.
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not valid JSON ({error}); was the run cut off?") from error
    return rows


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl that are of steps, not of evaluations."""
    return [row for row in read_rows(path) if not (isinstance(row, dict) and EVALUATION in row)]


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """One JSON object a line, as `read_rows` reads them."""
    # A lone surrogate, which some models emit, becomes its own JSON escape.
    part = path.with_name(path.name + ".part")  # a file is whole or absent, whenever the process ends
    with part.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    part.rename(path)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no NaN
