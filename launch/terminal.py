"""What commands share that show what a model says."""

from __future__ import annotations

import os
import re
import sys

_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but tabs and line ends, marks that turn the writing direction, and halves of surrogate pairs."""


def printable(text: str) -> str:
    r"""`text` with every character that a terminal would obey, or cannot show, as its escape.

    >>> print(printable("\x1b[2Jgone"))
    \x1b[2Jgone
    """
    return _OBEYED.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def drop_output() -> None:
    """Sends what was not written yet nowhere: whoever read standard output has stopped, as `head` does."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
