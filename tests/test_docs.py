"""The examples in docstrings and in the README are true."""

from __future__ import annotations

import doctest
import importlib

import pytest

OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


MODULES = [
    "grpo.advantages",
    "grpo.model.flops",
    "grpo.evidence.statistics",
    "launch.terminal",
    "rewards.scoring",
    "rollout.settings",
]


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples(module):
    results = doctest.testmod(importlib.import_module(module), optionflags=OPTIONS)
    assert results.attempted > 0 and results.failed == 0


def test_readme_examples():
    results = doctest.testfile("../README.md", optionflags=OPTIONS)
    assert results.attempted > 0 and results.failed == 0
