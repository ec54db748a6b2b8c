"""YAML is read as it looks, or refused in words that say what to write."""

from __future__ import annotations

import math

import pytest

from grpo.strict_yaml import read_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10", 10),
        ("0", 0),
        ("1_000", 1000),
        ("0x10", 16),
        (".5", 0.5),
        ("010.5", 10.5),
        ("1.0e-6", 1e-6),
        ("1e-6", "1e-6"),  # a text to YAML, which a setting takes for the number that it is
        ("-.inf", -math.inf),
        ("2024-01-01", "2024-01-01"),
        ("2024-01-01 10:00:00", "2024-01-01 10:00:00"),
        ("=", "="),
        ("'010'", "010"),
        ("~", None),
        ("", None),
        ("[yes, no, on, off, true]", [True, False, True, False, True]),
        ("!!str 10", "10"),
        ("{2024-01-01: 3}", {"2024-01-01": 3}),
        ("{'on': 1, '<<': 2}", {"on": 1, "<<": 2}),
        ("- &a 1\n- *a", [1, 1]),
    ],
)
def test_a_value_is_what_it_looks_like(text, value):
    assert read_yaml(text) == value and type(read_yaml(text)) is type(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{<<: {rate: 1, warm: 2}, rate: 9}", {"rate": 9, "warm": 2}),
        ("{rate: 9, <<: {rate: 1, warm: 2}}", {"rate": 9, "warm": 2}),
        ("{<<: [{rate: 1}, {rate: 2, warm: 3}]}", {"rate": 1, "warm": 3}),
        (
            "[&a {rate: 1, warm: 1}, &b {<<: *a, rate: 2}, {<<: *b, warm: 3}]",
            [{"rate": 1, "warm": 1}, {"rate": 2, "warm": 1}, {"rate": 2, "warm": 3}],
        ),
    ],
)
def test_a_mapping_has_its_own_keys_before_the_merged_ones_and_the_first_of_those(text, value):
    assert read_yaml(text) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("010", "010 begins with a zero, which makes a number octal in YAML; write 10, or quote it if it is a text"),
        ("-08", "-08 begins with a zero"),
        ("!!int '010'", "010 begins with a zero"),
        ("a: 1\nb: [1, 007]\n", "line 2: 007 begins with a zero, which makes a number octal in YAML; write 7"),
        ("1:30", "1:30 is a number to base 60 in YAML; write it out, or quote it"),
        ("1:30.5", "1:30.5 is a number to base 60"),
        ("{a: 1, a: 2}", "the key 'a' is given twice"),
        ("run: {name: a}\nrun: {name: b}\n", "line 2: the key 'run' is given twice"),
        ("{on: 1}", "YAML does not read the key on as a text; quote it"),
        ("{1: 2}", "YAML does not read the key 1 as a text; quote it"),
        ("{[1]: 2}", "a key is a text, not a list or a mapping"),
        ("{<<: 3}", "<< takes a mapping that has a name, as in <<: *name, or a list of them"),
        ("!!python/name:os.system x", "the tag !!python/name:os.system has no meaning in settings; write the value"),
        ("!env TOKEN", "the tag !env has no meaning in settings"),
        ("!!set {a, b}", "the tag !!set has no meaning"),
        ("&a [*a]", "recursive"),
        ("&a {x: *a}", "recursive"),
        ("[" * 600, "not valid YAML"),
        ("[1", "not valid YAML (while parsing"),
        ("[a, *x]", "not valid YAML (found undefined alias 'x')"),
        ("a: 1\n---\nb: 2", "line 2: not valid YAML (expected a single document"),
        ("!!float [1]", "expected a scalar node"),
        ("!!bool maybe", "not valid YAML"),
        ("0x_", "not valid YAML"),
        ("\x07", "not valid YAML"),
    ],
)
def test_what_looks_like_something_else_is_refused(text, message):
    with pytest.raises(ValueError) as error:
        read_yaml(text)
    assert message in str(error.value) and "<unicode string>" not in str(error.value)
