"""The examples in docstrings and in the README are true."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

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


READMES = sorted({Path("README.md"), *Path().glob("[!.]*/README.md")})


@pytest.mark.parametrize("readme", READMES, ids=str)
def test_links_and_files_that_a_readme_names_are_there(readme):
    text = readme.read_text()
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if "://" in link:
            continue
        file, _, section = link.partition("#")
        target = readme.parent / file if file else readme
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
        assert not section or section in [re.sub("[^a-z0-9 -]", "", h.lower()).replace(" ", "-") for h in headings], (
            link
        )
    for named in re.findall(r"`((?:tests|grpo|rollout|rewards|launch|configs)/[\w/.-]+\.(?:py|yaml|sh|md))`", text):
        assert Path(named).exists(), named
    for module in re.findall(r"python -m ((?:launch|tests)[\w.]+\w)", text):
        assert Path(module.replace(".", "/")).with_suffix(".py").exists(), module


def test_the_first_readme_is_short():
    assert len(Path("README.md").read_text().splitlines()) < 250


def test_readme_examples():
    results = doctest.testfile("../README.md", optionflags=OPTIONS)
    assert results.attempted > 0 and results.failed == 0
