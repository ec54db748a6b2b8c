"""Which engine a run takes, and its start."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Literal

import torch

from rollout.engines.interface import Engine
from rollout.settings import EngineSettings, without_password


def choose_engine(settings: EngineSettings) -> tuple[Literal["vllm", "transformers", "remote"], str]:
    """The engine `settings.kind` stands for, and why. Raises ValueError where it cannot be had."""
    if settings.kind == "remote":
        return "remote", f"vLLM at {without_password(settings.base_url)}"
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
        from rollout.engines.vllm import VLLMEngine

        return VLLMEngine(settings, model_folder, dtype, device, stop_ids)
    if kind == "remote":
        from rollout.engines.remote import RemoteEngine

        return RemoteEngine(settings, stop_ids)
    from rollout.engines.transformers import TransformersEngine

    return TransformersEngine(settings, model_folder, dtype, device, stop_ids)
