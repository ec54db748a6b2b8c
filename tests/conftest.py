from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def small_model() -> Path:
    """The small real model that `launch/setup.sh` prepares."""
    return Path("models/SmolLM2-135M-Instruct")
