"""Prompts for the LLM roles: text files with `${placeholders}`, checked once, filled with data.

Every value is filled in as JSON with `<` escaped: text from a conversation can neither close a
`<tag>` of the template nor open one, so what a reply contains stays data. Braces, dollars and
backslashes in it are plain text (`string.Template` never looks at values).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from string import Template
from typing import Any

from rollout.settings import looked_at, user_path
from rollout.types import Message

SYSTEM_PROMPTS = {"proactive": Path(__file__).parent / "prompts" / "system_proactive.txt"}
NO_SYSTEM_PROMPT = "none"


class Prompt:
    """A prompt's text file, ready to be filled."""

    def __init__(self, file: Path, placeholders: Iterable[str], optional: Iterable[str] = ()):
        """Reads the file. Raises ValueError where it is unreadable, lacks a placeholder that is not `optional`, or
        misspells one.
        """
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"cannot read the prompt {file}: {error}{looked_at(file)}; give the path of a UTF-8 text file"
            ) from error
        self._template = Template(text)
        needed, known = {*placeholders}, {*placeholders, *optional}
        names = "".join(f" ${{{name}}}" for name in sorted(known))
        if not self._template.is_valid():
            raise ValueError(f"{file}: a lone '$' in the prompt; write '$$' for a dollar sign (placeholders:{names})")
        found = set(self._template.get_identifiers())
        for problem, wrong in (("lacks", needed - found), ("has the unknown placeholder", found - known)):
            if wrong:
                free = f" ({', '.join(sorted(known - needed))} may be left out)" if known - needed else ""
                raise ValueError(
                    f"{file}: the prompt {problem} ${{{min(wrong)}}}; it must use exactly these:{names}{free}"
                )

    def fill(self, **values: Any) -> str:
        """The prompt's text with each placeholder replaced by its value as JSON."""
        return self._template.substitute({name: as_data(value) for name, value in values.items()}).strip()


def system_prompt(name: str) -> str:
    """The text that `rollout.system_prompt` names, "" for `none`.

    Raises ValueError where the file is unreadable or empty.
    """
    if name == NO_SYSTEM_PROMPT:
        return ""
    file = SYSTEM_PROMPTS.get(name, user_path(name))
    try:
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"rollout.system_prompt: cannot read {file} ({error}){looked_at(file)}; give a UTF-8 text file or one of: "
            f"{', '.join([*SYSTEM_PROMPTS, NO_SYSTEM_PROMPT])}"
        ) from error
    if not text:
        raise ValueError(f"rollout.system_prompt: {file} is empty; write the prompt, or set it to {NO_SYSTEM_PROMPT}")
    return text


def as_data(value: Any) -> str:
    """JSON that holds no `<`, so that no value can forge the tags around it."""
    return json.dumps(value, ensure_ascii=False).replace("<", "\\u003c")


def visible(messages: Sequence[Message]) -> list[dict[str, str]]:
    """The conversation as its user saw it, role-tagged: without the system message."""
    return [{"role": m["role"], "content": m["content"]} for m in messages if m["role"] != "system"]
