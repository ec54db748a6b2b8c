from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
from hypothesis import settings


@pytest.fixture(scope="session")
def small_model() -> Path:
    """The small real model that `launch/setup.sh` prepares."""
    return Path("models/SmolLM2-135M-Instruct")


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds the client wanted to wait, without the waiting."""
    waited: list[float] = []
    at_once = asyncio.sleep

    async def sleep(seconds: float) -> None:
        waited.append(seconds)
        await at_once(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return waited


SLOW_FIRST = (
    *("test_training", "test_stopping", "test_exactness", "test_engine_remote", "test_overlap", "test_update"),
    *("test_communication", "test_fidelity", "test_families", "test_sync"),
)


SLOW = SLOW_FIRST + (
    *("test_charts", "test_peers", "test_hostile_endpoint", "test_extra", "test_secrecy", "test_gpus", "test_setup"),
    *("test_help", "test_benches", "test_cores", "test_slow_judge", "test_learning", "test_run_folder"),
)
"""What `--quick` leaves out: whatever starts engines, servers or processes of its own, or takes long."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="without the files that take long: under two minutes in all")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files that take minutes begin, so that no worker is left with one of them at the end."""
    order = {name: number for number, name in enumerate(SLOW_FIRST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
    if config.getoption("--quick"):
        slow = [item for item in items if item.path.stem in SLOW]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item.path.stem not in SLOW]


# Whoever starts the tests in the background may have had Ctrl-C ignored, and their children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A machine that is busy with something else is no failure.
settings.register_profile("collab", deadline=None, max_examples=50)
settings.load_profile("collab")
