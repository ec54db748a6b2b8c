"""Reads training rows into scenarios, and says which of them each step takes.

Two formats. Parquet as the CollabLLM recipe writes it: `prompt` (list of {role, content}),
`ground_truth`, `extra_info.interaction_kwargs.{single_turn_prompt, task_desc}`, `reward_model`,
`data_source`. JSONL: `prompt` (text or list of messages), `reference`, `goal`, `task_desc`, `data_source`. Both may
hold a `persona`, parquet among the interaction_kwargs. Further columns are told, and not read (`rollout/columns.py`).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pyarrow.parquet as pq

from rollout.chat import Chat
from rollout.columns import JSONL, OF_THE_RECIPE, PARQUET, Columns, parquet_columns
from rollout.settings import DataSettings, looked_at
from rollout.types import Message, Scenario

UserKind = Literal["llm", "scripted"]
ROLES = ("system", "user", "assistant")
NEEDED_COLUMNS = ("prompt", "extra_info", "data_source")


def read_scenarios(
    path: Path, *, need_reference: bool, user: UserKind | None = None, tell: Callable[[str], None] = lambda text: None
) -> list[Scenario]:
    """All rows of `path`, in file order. `tell` hears of columns that nobody reads.

    Raises ValueError naming file, row and column for: a missing or misspelt column, a missing or empty file, a
    null or empty prompt, a message without role or content, a prompt that does not end with the user, and a
    missing reference where `need_reference` (BLEU compares with it). With a `user` to play, also for a row
    that leaves the user nothing to want: an LLM needs the goal, a script the goal or the reference.
    """
    if not path.exists():
        raise ValueError(f"{path}: no such data file{looked_at(path)}")
    if path.suffix == ".parquet":
        columns = Columns(PARQUET, OF_THE_RECIPE)
        rows = _parquet_rows(path, columns)
    elif path.suffix == ".jsonl":
        columns = Columns(JSONL)
        rows = _jsonl_rows(path, columns)
    else:
        raise ValueError(f"{path}: data files are .parquet or .jsonl")
    scenarios = [_scenario(path, row, fields, need_reference, user) for row, fields in rows]
    if not scenarios:
        raise ValueError(f"{path}: the file has no rows")
    if columns.unread:
        tell(f"{path}: nothing reads the columns {', '.join(map(repr, columns.unread))}")
    return scenarios


def _parquet_rows(path: Path, columns: Columns) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        table = pq.read_table(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a readable parquet file ({error})") from error
    columns.see(str(path), [*parquet_columns(table.schema)])
    missing = [name for name in NEEDED_COLUMNS if name not in table.column_names]
    if not {"ground_truth", "reward_model"} & set(table.column_names):
        missing.append("ground_truth")
    if missing:
        raise ValueError(
            f"{path}: column {', '.join(map(repr, missing))} is missing; it has {', '.join(table.column_names)} "
            "(the schema is in rollout/data.py; launch.prepare_data writes it)"
        )
    try:
        records = table.to_pylist()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: holds text that is not UTF-8 ({error})") from error
    for row, record in enumerate(records):
        extra = _struct(path, row, "extra_info", record["extra_info"])
        interaction = _struct(path, row, "extra_info.interaction_kwargs", extra.get("interaction_kwargs"))
        reward_model = _struct(path, row, "reward_model", record.get("reward_model"))
        reference = record.get("ground_truth")
        fields = {
            "prompt": record["prompt"],
            "reference": reference or reward_model.get("ground_truth"),
            "goal": interaction.get("single_turn_prompt"),
            "task_desc": interaction.get("task_desc"),
            "persona": interaction.get("persona"),
            "data_source": record["data_source"],
        }
        yield row, fields


def _struct(path: Path, row: int, column: str, value: Any) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{path}, row {row}: {column!r} must be a struct, not {type(value).__name__}")
    return value or {}


def _jsonl_rows(path: Path, columns: Columns) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows are lines, blank ones counted, so that an editor finds them."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # splitlines would cut at characters within a row
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as UTF-8 text ({error})") from error
    for row, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            json.dumps(record, ensure_ascii=False).encode("utf-8")  # an escaped half of a surrogate pair is not UTF-8
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, row {row}: not valid JSON ({error})") from error
        if isinstance(record, dict):
            columns.see(f"{path}, row {row}", record)
        if not isinstance(record, dict) or "prompt" not in record:
            raise ValueError(f"{path}, row {row}: 'prompt' is missing; a row is {{prompt, reference, goal, task_desc}}")
        if isinstance(record["prompt"], str) and record["prompt"].strip():
            record["prompt"] = [{"role": "user", "content": record["prompt"]}]
        yield row, record


def _scenario(path: Path, row: int, fields: Mapping[str, Any], need_reference: bool, user: UserKind | None) -> Scenario:
    where = f"{path}, row {row}"
    texts = {name: fields.get(name) for name in ("reference", "goal", "task_desc", "data_source", "persona")}
    for name, value in texts.items():
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{where}: {name!r} must be text, not {type(value).__name__}")
    if need_reference and not (texts["reference"] or "").strip():
        raise ValueError(
            f"{where}: the reference ('reference', or 'ground_truth' in parquet) is missing and bleu_score needs one; "
            "fill it or drop the weight"
        )
    wishes = {None: (), "llm": ("goal",), "scripted": ("goal", "reference")}[user]
    if wishes and not any((texts[name] or "").strip() for name in wishes):
        raise ValueError(
            f"{where}: {' and '.join(wishes)} is missing ('goal', or extra_info.interaction_kwargs.single_turn_prompt), "
            f"so the simulated user (rollout.user.kind: {user}) has nothing to want; fill it"
        )
    source = texts["data_source"] or path.stem
    return Scenario(
        scenario_id=f"{source}/{row}",
        messages=_messages(where, fields["prompt"]),
        goal=texts["goal"] or "",
        task_desc=texts["task_desc"] or "",
        reference=texts["reference"],
        data_source=source,
        row=row,
        persona=texts["persona"] or "",
    )


def _messages(where: str, prompt: Any) -> tuple[Message, ...]:
    if not isinstance(prompt, list) or not prompt:
        what = "null" if prompt is None else "empty" if not prompt else f"{type(prompt).__name__} {str(prompt)[:40]!r}"
        raise ValueError(f"{where}: 'prompt' is {what}; it must be a list of messages")
    for number, message in enumerate(prompt):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise ValueError(f"{where}: message {number} of 'prompt' needs a role of {', '.join(ROLES)}")
        if not _content(f"{where}: message {number} of 'prompt'", message.get("content")).strip():
            raise ValueError(f"{where}: message {number} of 'prompt' has no content")
        if message["role"] == "system" and number > 0:
            raise ValueError(f"{where}: message {number} of 'prompt' is a system message; only the first may be")
    if prompt[-1]["role"] != "user":
        raise ValueError(f"{where}: 'prompt' ends with {prompt[-1]['role']!r}; it must end with the user's message")
    return tuple({"role": message["role"], "content": _content(where, message["content"])} for message in prompt)


def _content(where: str, content: Any) -> str:
    """Text, or the text of content parts (`[{"type": "text", "text": …}]`) line by line; "" where there is nothing.

    Raises ValueError for other parts.
    """
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    for part in content:
        if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
            continue
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise ValueError(
            f'{where} has a part of type {kind!r} in its content; only text can be trained on: {{"type": "text", '
            '"text": ...}, or the text alone'
        )
    return "\n".join(part["text"] for part in content)


def with_system_prompt(scenarios: Sequence[Scenario], text: str) -> list[Scenario]:
    """The scenarios behind the system message `text` (none where it is empty), in place of their own."""
    system = ({"role": "system", "content": text},) if text else ()
    return [replace(scenario, messages=system + scenario.messages[len(scenario.system) :]) for scenario in scenarios]


def common_system_prompt(scenarios: Sequence[Scenario]) -> str | None:
    """The system message that all of them begin with; None where there is no such one."""
    found = {message["content"] for scenario in scenarios for message in scenario.system}
    return found.pop() if len(found) == 1 and all(scenario.system for scenario in scenarios) else None


def fit_prompts(
    scenarios: Sequence[Scenario], chat: Chat, settings: DataSettings, path: Path, limit: int
) -> tuple[list[Scenario], int]:
    """Scenarios whose prompts have at most `limit` tokens, and the length of the longest of them.

    Raises ValueError naming the first offending row where `overlong_prompts: error`, or where nothing is left.
    """
    kept, longest = [], 0
    for scenario in scenarios:
        try:
            length = len(chat.prompt_ids(scenario.messages))
        except Exception as error:  # templates raise what they like: no system role here, roles must alternate there
            raise ValueError(
                f"{path}, row {scenario.row}: the model's chat template does not take this prompt ({error})"
            ) from error
        if length <= limit:
            kept.append(scenario)
            longest = max(longest, length)
        elif settings.overlong_prompts == "error":
            raise ValueError(
                f"{path}, row {scenario.row}: the prompt has {length} tokens, the limit is {limit} "
                "(data.max_prompt_tokens, and engine.max_context_tokens less the reply); raise it or set "
                "data.overlong_prompts=drop"
            )
    if not kept:
        raise ValueError(f"{path}: every prompt is longer than {limit} tokens; raise data.max_prompt_tokens")
    return kept, longest


def steps_per_epoch(num_scenarios: int, prompts_per_step: int) -> int:
    """Whole batches in one pass over the data; the incomplete last one is dropped."""
    if num_scenarios < prompts_per_step:
        raise ValueError(
            f"rollout.prompts_per_step: {prompts_per_step} is more than the {num_scenarios} prompts there are; lower it"
        )
    return num_scenarios // prompts_per_step


def batch_rows(step: int, num_scenarios: int, prompts_per_step: int, seed: int) -> list[int]:
    """Indices of the scenarios of step `step` (from 0).

    A pure function of its arguments, so that a resumed run and every rank agree without any state: each
    epoch is its own seeded permutation and takes every scenario at most once.
    """
    epoch, batch = divmod(step, steps_per_epoch(num_scenarios, prompts_per_step))
    order = list(range(num_scenarios))
    random.Random(f"order/{seed}/{epoch}").shuffle(order)
    return order[batch * prompts_per_step : (batch + 1) * prompts_per_step]


def spare_rows(step: int, num_scenarios: int, rows: Sequence[int], seed: int) -> list[int]:
    """The scenarios that are not in step `step`'s batch `rows`, in a seeded order: who refills takes the first."""
    spare = sorted(set(range(num_scenarios)) - set(rows))
    random.Random(f"spare/{seed}/{step}").shuffle(spare)
    return spare


def sample_seed(run_seed: int, step: int, scenario: int, sample: int, turn: int) -> int:
    """Seed of one sampled message; independent of the rank and of the rest of the batch."""
    return random.Random(f"sample/{run_seed}/{step}/{scenario}/{sample}/{turn}").getrandbits(31)
