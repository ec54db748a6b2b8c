"""What a reply thinks before it speaks: `<think> … </think>` at its beginning, as reasoning models write it.

Some chat templates open the thought themselves, at the end of every prompt; then a reply begins within it.
"""

from __future__ import annotations

import re

_NAME = r"(?:\w+:)?think(?:ing)?"
MARK = re.compile(rf"</?{_NAME}>|\[/?think\]", re.IGNORECASE)
_OPENS = re.compile(rf"\s*(?:<{_NAME}>|\[think\])", re.IGNORECASE)
_CLOSES = re.compile(rf"(?:</{_NAME}>|\[/think\])\s*", re.IGNORECASE)
_OPEN_END = re.compile(rf"(?:<{_NAME}>|\[think\])\s*\Z", re.IGNORECASE)
_CLOSED_END = re.compile(rf"(?:</{_NAME}>|\[/think\])\s*\Z", re.IGNORECASE)
_MAY_OPEN = re.compile(r"[<\[][\w:]*")


def may_open(text: str) -> bool:
    """Whether the beginning of a reply may be half a mark that opens a thought."""
    return _MAY_OPEN.fullmatch(text) is not None


def open_end(prompt: str) -> str:
    """The mark, with the blanks after it, that ends a prompt whose replies begin within a thought; else ""."""
    mark = _OPEN_END.search(prompt)
    return mark.group() if mark else ""


def closing(mark: str) -> str:
    """What ends the thought that `mark` opens."""
    return mark.strip().replace("<", "</").replace("[", "[/")


def split_thought(text: str, *, opened: bool) -> tuple[str, str]:
    """(the thought, its marks and the blanks behind it included; what is said), which together are `text`.

    `opened`: the prompt began the thought. One that never ends is all there is.

    >>> split_thought("<think>Hm.</think> Yes.", opened=False)
    ('<think>Hm.</think> ', 'Yes.')
    >>> split_thought("Hm, hm", opened=True)
    ('Hm, hm', '')
    """
    end = 0
    while opened or _OPENS.match(text, end):
        close = _CLOSES.search(text, end)
        if close is None:
            return text, ""
        end, opened = close.end(), False
    return text[:end], text[end:]


def never_ends(thought: str) -> bool:
    """Whether a thought that `split_thought` gave was cut, or given up, before its end."""
    return bool(thought) and not _CLOSED_END.search(thought)
