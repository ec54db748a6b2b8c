"""The set-up fails with one clear line, before it downloads anything."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.fixture
def clone(tmp_path):
    """The files that `launch/setup.sh` reads, in a folder without an environment."""
    for name in ("launch/setup.sh", "launch/help.sh", "setup.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(name, tmp_path / name)
    shutil.copytree("launch/requirements", tmp_path / "launch/requirements")
    return tmp_path


def program(folder: Path, name: str, script: str) -> Path:
    """A program of that name, which PATH finds first."""
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{script}\n")
    path.chmod(0o755)
    return path


def set_up(clone: Path, **environment: str) -> str:
    """What a failing set-up says last. Raises AssertionError where it does not fail."""
    env = os.environ | {"PATH": f"{clone}/bin:{os.environ['PATH']}"} | environment
    done = subprocess.run(["bash", "launch/setup.sh"], cwd=clone, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    (line,) = done.stderr.strip().splitlines()
    return line


def test_an_old_python_is_named_with_what_is_needed(clone):
    old = program(clone, "python-old", "if [[ $1 == -V ]]; then echo Python 3.9.1; else exit 1; fi")
    line = set_up(clone, PYTHON=str(old))
    assert "needs Python 3.11, 3.12 or 3.13" in line and "3.9.1" in line


def test_a_full_disk_is_told_before_anything_is_downloaded(clone):
    program(clone, "df", 'printf "h\\n/dev/x 9 9 1048576 1%% /\\n"')
    line = set_up(clone)
    assert "GB of free disk space" in line and "which has 1 GB" in line
    assert not (clone / ".venv" / "pip.log").exists()


def test_a_registry_out_of_reach_is_told_in_one_line(clone):
    nowhere = {
        "PIP_INDEX_URL": "http://127.0.0.1:9/",
        "PIP_RETRIES": "1",
        "PIP_TIMEOUT": "2",
        "PIP_CONFIG_FILE": os.devnull,
    }
    line = set_up(clone, **nowhere, PIP_FIND_LINKS="", PIP_EXTRA_INDEX_URL="")
    assert "the package registry cannot be reached" in line


def test_an_environment_made_by_hand_is_left_alone(clone):
    (clone / ".venv").mkdir()
    assert ".venv was not made by this script" in set_up(clone)
    assert list((clone / ".venv").iterdir()) == []
