"""--help tells what there is, at once: nothing is set up, read or written for it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from grpo.config import Config
from rollout.settings import Section

SCRIPTS = [path.name for path in Path("launch").glob("*.sh") if path.name != "help.sh"]
COMMANDS = [path.stem for path in Path("launch").glob("*.py") if 'if __name__ == "__main__":' in path.read_text()]
PACKAGES = ["grpo", "launch", "rewards", "rollout"]
ASK_ALL = """
import contextlib, io, json, runpy, sys
helps = {}
for command in sys.argv[1:]:
    sys.argv = [command, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        runpy.run_module(f"launch.{command}", run_name="__main__")
    helps[command] = out.getvalue()
print(json.dumps(helps))
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A folder that holds the code alone: no .venv, model or data."""
    folder = tmp_path_factory.mktemp("bare")
    for package in PACKAGES:
        (folder / package).symlink_to(Path(package).resolve())
    yield folder
    assert sorted(path.name for path in folder.iterdir()) == PACKAGES


@pytest.fixture(scope="module")
def helps(bare):
    """What each command prints; one process asks them all, since most import torch."""
    ask = [sys.executable, "-c", ASK_ALL, *COMMANDS]
    return json.loads(subprocess.run(ask, cwd=bare, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_tells_its_usage_and_options(helps, command):
    assert helps[command].startswith(f"usage: python -m launch.{command} ") and "options:" in helps[command]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("options", [["--help"], ["-x", "-h"]], ids=" ".join)
def test_a_script_tells_its_usage(bare, script, options):
    ask = ["bash", f"launch/{script}", *options]
    done = subprocess.run(ask, cwd=bare, capture_output=True, text=True, timeout=60, env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 0 and not done.stderr
    assert f"bash launch/{script}" in done.stdout and "source" not in done.stdout


def test_every_setting_is_listed_with_its_unit_and_default(helps):
    assert re.search(r"^  rollout.max_reply_tokens +2048 +tokens; longest first reply$", helps["train"], re.MULTILINE)
    assert re.search(r"^  optimizer.lr +1.0e-06 +learning rate", helps["train"], re.MULTILINE)
    settings = [line for line in helps["train"].splitlines() if line.startswith("  run.")]
    for command in ("converse", "quickstart"):
        assert [line for line in helps[command].splitlines() if line.startswith("  run.")] == settings


def choices_of(section: type[Section], prefix: str = "") -> typing.Iterator[tuple[str, list[str]]]:
    """The settings that take one of some values, and those values."""
    for name, field in section.model_fields.items():
        parts = [field.annotation, *typing.get_args(field.annotation)]
        for part in parts:
            if isinstance(part, type) and issubclass(part, Section):
                yield from choices_of(part, f"{prefix}{name}.")
        for part in parts:
            if typing.get_origin(part) is typing.Literal:
                yield prefix + name, [str(value) for value in typing.get_args(part) if value is not None]


@pytest.mark.parametrize("setting", [*choices_of(Config)], ids=lambda setting: setting[0])
def test_every_choice_is_listed_with_all_its_values(helps, setting):
    key, choices = setting
    (line,) = (line for line in helps["train"].splitlines() if line.split()[:1] == [key])
    described = line.split(maxsplit=2)[2]  # behind key and default
    assert {*choices} <= {*re.findall(r"[\w-]+", described)}
