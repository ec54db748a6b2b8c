"""YAML that is read as it looks, or refused in words that say what to write.

YAML 1.1 reads 010 as 8, 1:30 as 90, 2024-01-01 as a date and the key `on` as true, and of two equal keys it keeps the
last. Here such numbers and keys are refused, as are tags of other types, and a date is the text that it looks like. on,
off, yes and no stay switches: `rollout.settings.Section` refuses those where none belongs. Anchors and merge keys (<<)
work.
"""

from __future__ import annotations

import re
from typing import Any, NoReturn

import yaml

_STANDARD = "tag:yaml.org,2002:"
_TEXTS = frozenset(_STANDARD + name for name in ("str", "timestamp", "value"))  # the last is a lone =
_MERGE = _STANDARD + "merge"
_LEADING_ZERO = re.compile(r"[-+]?0[0-9_]+$")


def read_yaml(text: str) -> Any:
    """Mappings, lists, texts, numbers, switches and null. Raises ValueError, with the line where there are several."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if "\n" in text.strip() and error.problem_mark else ""
        told = ", ".join(filter(None, (error.context, error.problem)))
        refused = isinstance(error, yaml.constructor.ConstructorError)
        raise ValueError(f"{line}{told}" if refused else f"{line}not valid YAML ({told})") from None
    except (yaml.YAMLError, ValueError, LookupError, RecursionError) as error:  # 0x_, !!bool maybe, [[[[ …
        raise ValueError(f"not valid YAML ({str(error).splitlines()[0]})") from None


class _Loader(yaml.SafeLoader):
    yaml_constructors = {
        _STANDARD + name: yaml.SafeLoader.yaml_constructors[_STANDARD + name] for name in ("null", "bool", "seq", "map")
    } | dict.fromkeys(_TEXTS, yaml.SafeLoader.construct_yaml_str)

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        """Its own keys, each once, and those that it merges: the first of them to name a key gives its value."""
        node = super().compose_mapping_node(anchor)
        pairs: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                _refuse(key, "a key is a text, not a list or a mapping")
            if key.tag not in {*_TEXTS, _MERGE}:
                _refuse(key, f"YAML does not read the key {key.value} as a text; quote it")
            if key.value in pairs:
                _refuse(key, f"the key {key.value!r} is given twice")
            pairs[key.value] = key, value
        if "<<" in pairs and pairs["<<"][0].tag == _MERGE:
            _, value = pairs.pop("<<")
            for source in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                if not isinstance(source, yaml.MappingNode):
                    _refuse(source, "<< takes a mapping that has a name, as in <<: *name, or a list of them")
                pairs |= {key.value: (key, value) for key, value in source.value if key.value not in pairs}
        node.value = [*pairs.values()]
        return node

    def construct_document(self, node: yaml.Node) -> Any:
        self.deep_construct = True  # or a list that holds itself would be made
        return super().construct_document(node)

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        written = self.construct_scalar(node)
        if ":" in written:
            _refuse(node, f"{written} is a number to base 60 in YAML; write it out, or quote it if it is a text")
        if _LEADING_ZERO.match(written):
            decimal = int(written.replace("_", ""))
            _refuse(
                node,
                f"{written} begins with a zero, which makes a number octal in YAML; write {decimal}, or quote it if it "
                "is a text",
            )
        whole = node.tag == _STANDARD + "int"
        return self.construct_yaml_int(node) if whole else self.construct_yaml_float(node)

    def construct_undefined(self, node: yaml.Node) -> NoReturn:
        _refuse(node, f"the tag {node.tag.replace(_STANDARD, '!!')} has no meaning in settings; write the value alone")


for _name in ("int", "float"):
    _Loader.add_constructor(_STANDARD + _name, _Loader.construct_number)
_Loader.add_constructor(None, _Loader.construct_undefined)
_Loader.add_implicit_resolver(_STANDARD + "int", _LEADING_ZERO, list("-+0"))  # 08 and 09 too, which are texts to YAML


def _refuse(node: yaml.Node, problem: str) -> NoReturn:
    raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
