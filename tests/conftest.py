from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings


@pytest.fixture(scope="session")
def small_model() -> Path:
    """The small real model that `launch/setup.sh` prepares."""
    return Path("models/SmolLM2-135M-Instruct")


# A machine that is busy with something else is no failure.
settings.register_profile("collab", deadline=None, max_examples=50)
settings.load_profile("collab")
