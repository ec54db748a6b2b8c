"""The shape of the code: data flows one way, and engines stay behind their files."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

LAYERS = ["rollout", "rewards", "grpo", "launch"]
ONLY_IN = {"vllm": "rollout/engine_vllm.py", "deepspeed": "grpo/policy.py"}


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_from_launch_towards_rollout(layer):
    later = set(LAYERS[LAYERS.index(layer) + 1 :])
    for path in Path(layer).rglob("*.py"):
        assert not imports(path) & later, f"{path} imports {imports(path) & later}"


@pytest.mark.parametrize(("package", "home"), ONLY_IN.items())
def test_one_file_imports_each_engine(package, home):
    found = {str(path) for layer in LAYERS for path in Path(layer).rglob("*.py") if package in imports(path)}
    assert found == {home}
