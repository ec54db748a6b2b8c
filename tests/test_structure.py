"""The shape of the code: data flows one way, between packages and between the rooms of one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

LAYERS = ["rollout", "rewards", "grpo", "launch"]
ONLY_IN = {"vllm": "rollout/engines/vllm.py", "deepspeed": "grpo/model/zero.py"}
ROOMS = {
    "rollout/engines": {"rollout.cores", "rollout.files", "rollout.settings", "rollout.roles.endpoints"},
    "rollout/roles": {"rollout.settings", "rollout.types"},
    "grpo/model": {"grpo.config", "grpo.dealing", "grpo.groups", "grpo.ranks"},
    "grpo/evidence": {"grpo.config", "grpo.groups", "grpo.ranks"},
    "grpo/run": {"grpo.advantages", "grpo.config", "grpo.ranks", "grpo.evidence", "grpo.model"},
}
"""What each may import of its own package, beside itself: no room knows who works in it."""


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def modules(path: Path) -> set[str]:
    """The project's files that it imports, dotted."""
    found = set()
    for name in imports(path):
        while name and not Path(name.replace(".", "/")).with_suffix(".py").exists():
            name = name.rpartition(".")[0]
        found |= {name} - {""}
    return found


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_from_launch_towards_rollout(layer):
    later = set(LAYERS[LAYERS.index(layer) + 1 :])
    for path in Path(layer).rglob("*.py"):
        found = {name for name in imports(path) if name.split(".")[0] in later}
        assert not found, f"{path} imports {found}"


@pytest.mark.parametrize(("package", "home"), ONLY_IN.items())
def test_one_file_imports_each_engine(package, home):
    files = [path for layer in LAYERS for path in Path(layer).rglob("*.py")]
    assert {str(path) for path in files if package in {name.split(".")[0] for name in imports(path)}} == {home}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_it_may(room):
    package, own = room.split("/")[0], room.replace("/", ".")
    for path in Path(room).glob("*.py"):
        of_package = {
            name for name in modules(path) if name.startswith(f"{package}.") and not name.startswith(f"{own}.")
        }
        wrong = {
            name for name in of_package if not any(name == may or name.startswith(f"{may}.") for may in ROOMS[room])
        }
        assert not wrong, f"{path} imports {wrong}"


@pytest.mark.parametrize("layer", LAYERS)
def test_no_two_files_import_each_other_in_a_circle(layer):
    graph = {str(path.with_suffix("")).replace("/", "."): modules(path) for path in Path(layer).rglob("*.py")}
    while leaves := [name for name, needs in graph.items() if not needs & graph.keys() - {name}]:
        for name in leaves:
            del graph[name]
    assert not graph
