"""A run's YAML file: read, overridden, checked once before any model loads; and its faults, put into words.

Unknown keys name the nearest known one. Overrides are `section.key=value` with YAML values; a whole
section may come from a file of its own: `rewards=configs/rewards/short_replies.yaml`.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ValidationError

from grpo.config import Config
from grpo.presets import PRESETS
from grpo.strict_yaml import read_yaml
from rollout.settings import as_written, looked_at, near_name, user_path, without_password


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Reads and checks `path`. Raises ValueError, one line per fault, each naming the key and the remedy."""
    values = _read_yaml(path)
    for override in overrides:
        _apply(values, override)
    preset = values.get("preset")
    values = _merged(PRESETS[preset] if isinstance(preset, str) and preset in PRESETS else {}, values)
    where = f"{path} with {' '.join(map(_told, overrides))}" if overrides else str(path)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        faults = dict.fromkeys(_fault(fault) for fault in error.errors())
        raise ValueError("\n".join(f"{where}: {fault}" for fault in faults)) from error


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` with what `under` adds to it, section by section."""
    both = {**under, **over}
    for name in under.keys() & over.keys():
        if isinstance(under[name], Mapping) and isinstance(over[name], Mapping | None):  # None: a heading alone
            both[name] = _merged(under[name], over[name] or {})
    return both


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error}){looked_at(path)}") from error
    try:
        values = read_yaml(text)
    except ValueError as error:
        raise ValueError(f"{path}: {without_password(str(error))}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: must be a mapping of sections, such as configs/quickstart.yaml")
    return values


def _told(override: str) -> str:
    key, equals, value = override.partition("=")
    return key + equals + without_password(value) if equals else without_password(override)


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ValueError(f"{_told(override)!r} is not an override; write section.key=value")
    *sections, last = key.split(".")
    if not sections and last == "preset":
        values["preset"] = preset = _value(override, text)
        if isinstance(preset, str):
            for section, settings in deepcopy(PRESETS.get(preset, {})).items():
                if isinstance(values.get(section) or {}, dict):  # else refused with all other faults
                    values[section] = _merged(values.get(section) or {}, settings)
        return
    if not sections:
        if last not in Config.model_fields:
            raise ValueError(f"{key}: {_unknown(last, Config)}")
        try:
            values[last] = _read_yaml(user_path(text))
        except ValueError as error:
            raise ValueError(
                f"{_told(override)!r}: a whole section comes from a YAML file: {without_password(str(error))}"
            ) from None
        return
    for section in sections:
        if values.get(section) is None:  # absent, or a section with nothing in it
            values[section] = {}
        values = values[section]
        if not isinstance(values, dict):
            raise ValueError(f"{_told(override)!r}: {section} is not a section")
    values[last] = _value(override, text)


def _value(override: str, text: str) -> Any:
    if not text.strip():  # null to YAML: a variable of the shell that is not set would change a setting silently
        raise ValueError(f"{override!r}: no value follows; write one, or null")
    try:
        return read_yaml(text)
    except ValueError as error:
        raise ValueError(f"{_told(override)!r}: {without_password(str(error))}") from None


_IN_PLAIN_WORDS = {
    "a valid boolean, unable to interpret input": "true or false",
    "a valid dictionary": "a mapping, such as {key: value}",
    "a valid string": "a text",
    "a valid tuple": "a list, such as [0.1, 0.9]",
    "input is not a valid path for <class 'pathlib.Path'>": "input should be a path",
}
"""What pydantic calls by Python's names."""


def _fault(fault: dict[str, Any]) -> str:
    location = [str(part) for part in fault["loc"]]
    if location[:2] == ["rewards", "truncated"]:  # pydantic tells of each branch of the union
        return f"rewards.truncated: {as_written(fault['input'])} will not do: a finite number, score or mask"
    key = ".".join(location)
    given = without_password(as_written(fault["input"]))
    if fault["type"] == "extra_forbidden":
        return f"{key}: {_unknown(location[-1], _section(location[:-1]))}"
    if fault["type"] == "missing":
        return f"{key}: is missing; add it"
    if fault["type"] == "model_type":
        known = ", ".join(_section(location).model_fields)
        return f"{key}: {given} will not do: it is a section with keys of its own ({known})"
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "value_error":
        return f"{key}: {message}" if key else message
    message = message[0].lower() + message[1:]
    for jargon, plain in _IN_PLAIN_WORDS.items():
        message = message.replace(jargon, plain)
    quotable = fault["type"] in ("string_type", "path_type") and isinstance(fault["input"], int | float | dict)
    # A shell takes one pair of quotes for itself.
    hint = f" (quote it; on the command line: \"{key}='...'\")" if quotable else ""
    return f"{key}: {given} will not do: {message}{hint}"


def _unknown(name: str, section: type[BaseModel]) -> str:
    known = list(section.model_fields)
    return "there is no such key" + (near_name(name, known) or f"; known here: {', '.join(known)}")


def _section(location: Sequence[str]) -> type[BaseModel]:
    section: type[BaseModel] = Config
    for name in location:
        section = _section_of(section.model_fields[name].annotation) or section
    return section


def _section_of(annotation: Any) -> type[BaseModel] | None:
    candidates = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def describe_settings(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """One line per setting: key, default, description, and the values to choose from where it does not name them."""
    for name, field in section.model_fields.items():
        inner = _section_of(field.annotation)
        if inner:
            yield from describe_settings(inner, f"{prefix}{name}.")
            continue
        default = "required" if field.is_required() else _shown(field.get_default())
        choices = [*map(str, _choices(field.annotation))]
        named = set(re.findall(r"[\w-]+", field.description)) >= {*choices}
        values = "" if named else f"; one of {', '.join(choices)}"
        yield f"  {prefix + name:<46} {default:<16} {field.description}{values}"


def _choices(annotation: Any) -> Iterator[Any]:
    """The values of every Literal in a type, null left out."""
    if typing.get_origin(annotation) is Literal:
        yield from (value for value in typing.get_args(annotation) if value is not None)
    else:
        for inner in typing.get_args(annotation):
            yield from _choices(inner)


def _shown(default: Any) -> str:
    return yaml.safe_dump(
        str(default) if isinstance(default, Path) else list(default) if isinstance(default, tuple) else default,
        default_flow_style=True,
    ).split("\n")[0]
