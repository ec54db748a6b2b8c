"""What a run writes into its folder: metrics, TensorBoard, traces, evaluations. Only the main rank does."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from torch.utils.tensorboard import SummaryWriter

from grpo.config import Config
from grpo.evidence.evaluate import EVALUATION, Evaluation
from grpo.run.disk import whole_file
from grpo.run.folder import RunFolder


class Recorder:
    """Writes into a run's folder, which it empties first; every line is on disk before the next step.

    Every method raises OSError where the disk does not take it, and leaves nothing half-written then.
    """

    def __init__(
        self,
        folder: RunFolder,
        config: Config,
        environment: Mapping[str, Any],
        system_prompt: str | None,
        *,
        total_steps: int,
        warnings: Sequence[str] = (),
    ):
        """`system_prompt`: what all training prompts begin with, which talking to the model needs too. `warnings`: what
        the settings gave cause for.
        """
        self.folder = folder
        folder.empty()
        for name in ("traces", "evaluations", "checkpoints"):
            (folder.path / name).mkdir(parents=True)
        folder.begin(total_steps, warnings)
        self._write("config.yaml", yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
        self._write("environment.json", json.dumps(environment, indent=2) + "\n")
        if system_prompt is not None:
            self._write(folder.system_prompt.name, system_prompt)
        self._tensorboard = SummaryWriter(folder.path / "tensorboard")

    def _write(self, name: str, text: str) -> None:
        with whole_file(self.folder.path / name) as file:
            file.write(text)

    def step(self, step: int, metrics: Mapping[str, float], traces: Iterable[dict[str, Any]]) -> None:
        write_rows(self.folder.traces(step), traces)
        self._metrics(step, metrics)

    def _metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        append_row(self.folder.metrics, {"step": step} | {name: _finite(value) for name, value in metrics.items()})
        for name, value in metrics.items():
            self._tensorboard.add_scalar(name, value, step)
        self._tensorboard.flush()

    def evaluation(self, evaluation: Evaluation) -> None:
        write_rows(self.folder.evaluation(evaluation.step), evaluation.rows)
        self._metrics(evaluation.step, evaluation.metrics())

    def close(self, totals: Mapping[str, float]) -> None:
        self._write("totals.json", json.dumps(totals, indent=2) + "\n")
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
    """One JSON object a line, as `read_rows` reads them. The file is whole or absent."""
    with whole_file(path) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """A further line, whole or not at all."""
    with path.open("ab", buffering=0) as file:
        size, rest = file.tell(), (json.dumps(row) + "\n").encode()
        try:
            while rest:  # a disk that is nearly full takes a part, and then refuses
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(size)
            raise


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no NaN
