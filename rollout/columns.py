"""The columns of a data file: which are read, and what becomes of the others.

One that is nearly named like a column that is read and missing is an error, since its rows would lack what it was meant
to give. Others are told.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator

import pyarrow as pa

JSONL = ("prompt", "reference", "goal", "task_desc", "persona", "data_source")
_INTERACTION = "extra_info.interaction_kwargs"
PARQUET = (
    *("prompt", "ground_truth", "data_source", "reward_model", "reward_model.ground_truth", "extra_info", _INTERACTION),
    *(f"{_INTERACTION}.{name}" for name in ("single_turn_prompt", "task_desc", "persona")),
)
OF_THE_RECIPE = (
    *("raw_prompt", "agent_name", "index", "ability", "reward_model.style"),
    *("extra_info.prompt", "extra_info.split", "extra_info.index", f"{_INTERACTION}.name"),
)
"""What else its parquet files hold, for programs of its own."""
NEAR = 0.8
"""Of difflib's likeness: one letter of four wrong or missing."""


class Columns:
    """What the rows of a file hold beside the columns that are `read`, those that are `known` to be there left out."""

    def __init__(self, read: Collection[str], known: Collection[str] = ()):
        self.read, self.known = read, known
        self.unread: dict[str, None] = {}
        """Names in the order in which they came."""
        self._seen: set[frozenset[str]] = set()

    def see(self, where: str, names: Iterable[str]) -> None:
        """Takes in a row's names. Raises ValueError for one like that of a column that is read and this row lacks."""
        together = frozenset(names)
        if together in self._seen:
            return
        self._seen.add(together)
        lacking = [name for name in self.read if name not in together]
        for name in names:
            if name in self.read or name in self.known:
                continue
            inside, _, own = name.rpartition(".")
            beside = [other.removeprefix(f"{inside}.") for other in lacking if other.rpartition(".")[0] == inside]
            if near := difflib.get_close_matches(own.lower(), beside, 1, NEAR):
                raise ValueError(f"{where}: nothing reads {name!r}; did you mean {near[0]!r}? Rename it, or remove it")
            self.unread[name] = None


def parquet_columns(fields: pa.Schema | pa.StructType, inside: str = "") -> Iterator[str]:
    """Their names; what a struct holds that is read follows it, behind a dot."""
    for field in fields:
        name = inside + field.name
        yield name
        if name in PARQUET and pa.types.is_struct(field.type):
            yield from parquet_columns(field.type, f"{name}.")
