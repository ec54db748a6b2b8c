"""From what a model wrote to the object it was asked for, in one of two ways.

`read_strictly` is for whatever may become a score: JSON that fits its schema to the letter, or nothing.
`read_texts` is for what a simulated user says: its form does not matter as long as the words are there.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any

import json_repair
import jsonschema

LONGEST_REPAIR = 20_000
"""Characters; repairing takes about 10 ms per thousand, and other conversations wait meanwhile."""
MOST_BRACKETS_TO_REPAIR = 200
"""Opened ones; nested by the thousand they take seconds."""


class UnusableAnswer(ValueError):
    """`kind` is `not_json`, or `schema` where it is JSON but not what was asked for."""

    def __init__(self, kind: str, detail: str):
        super().__init__(detail)
        self.kind = kind


def read_strictly(text: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """The object that stands in `text`, exactly as the schema wants it. Raises UnusableAnswer."""
    # From the first brace to the last: some servers fence the object in Markdown or add a word around it.
    braced = _braced(text)
    try:
        if braced and _in_an_array(*text.split(braced, 1)):
            raise ValueError("the object stands in an array")
        answer = json.loads(
            braced, strict=False, parse_constant=finite, parse_float=finite, object_pairs_hook=_each_key_once
        )
        json.dumps(answer, ensure_ascii=False).encode()  # half a surrogate pair could be written to no file
    except (ValueError, RecursionError) as error:
        raise UnusableAnswer("not_json", f"{error} in {text!r}") from None
    problem = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema).iter_errors(answer))
    if problem is not None:
        raise UnusableAnswer("schema", f"{problem.json_path}: {problem.message}")
    return answer


def read_texts(text: str, schema: Mapping[str, Any]) -> dict[str, str]:
    """Every property of the schema as text, "" where there is none.

    Reads what is close to JSON too: fences, single quotes, commas too many, brackets and quotes too
    few. Numbers become text, lists and objects the texts in them, a line each. Control characters are
    left out. Raises UnusableAnswer where there is no object, or a text breaks off in its middle.
    """
    answer = _repaired(text)
    if not isinstance(answer, dict):
        raise UnusableAnswer("not_json", f"no object in {text!r}")
    return {name: _clean("\n".join(_texts(answer.get(name)))) for name in schema["properties"]}


def finite(digits: str) -> float:
    """The number. Raises ValueError where it is infinite or none."""
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits} is not a finite number")
    return value


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON would take the last of several, and a score said twice is none."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is given twice")
    return found


def _in_an_array(before: str, after: str) -> bool:
    """Whether a bracket is open where the object stands: it may be one of several."""
    return before.count("[") > before.count("]") or after.count("]") > after.count("[")


def _braced(text: str) -> str:
    return text[text.find("{") : text.rfind("}") + 1]


def _repaired(text: str) -> Any:
    """The object in `text`, mended where it must be. Raises UnusableAnswer."""
    try:
        return json.loads(_braced(text), strict=False)
    except (ValueError, RecursionError):
        pass  # what follows is for these
    if len(text) > LONGEST_REPAIR or sum(map(text.count, "{[(")) > MOST_BRACKETS_TO_REPAIR:
        raise UnusableAnswer("not_json", f"too long or too nested to repair: {text!r}")
    broken = _object(text)
    if not broken.endswith(("}", "]", '"', "'", "”")):  # half a sentence is not what the user wanted to say
        raise UnusableAnswer("not_json", f"no object, or one that breaks off: {text!r}")
    try:
        answer = json_repair.loads(broken, skip_json_loads=True)
    except Exception as error:  # a repair of anything at all may meet anything
        raise UnusableAnswer("not_json", f"{type(error).__name__}: {error} in {text!r}") from None
    return answer[-1] if isinstance(answer, list) and answer else answer


def _object(text: str) -> str:
    """From the first brace to the end of the object, or of `text` where the object's end cannot be told."""
    broken = "".join(text.partition("{")[1:]).rstrip("`, \n")
    last = max(map(broken.rfind, '{}"'))
    depth = 0
    for part in re.finditer(r'"(?:[^"\\]|\\.)*"?|[{}]', broken, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(part[0], 0)
        if part[0] == "}" and depth == 0 and part.start() == last:  # words alone follow
            return broken[: part.end()]
    return broken


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(part)
    elif value is not None:
        yield json.dumps(value)


def _clean(text: str) -> str:
    """Without control characters, and with U+FFFD for halves of surrogate pairs, which no tokenizer takes."""
    whole = text.replace("\r\n", "\n").encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return "".join(c for c in whole if c in "\n\t" or unicodedata.category(c) != "Cc")
