from __future__ import annotations

import math

import pytest

from tranship.config.yaml_text import read, write
from tranship.types import UserError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E5", 1e5),
        ("-2.5e+3", -2500.0),
        ("1.", 1.0),
        (".5", 0.5),
        ("12", 12),
        ("-3", -3),
        ("010", 10),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("off", "off"),
        ("yes", "yes"),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("1_000", "1_000"),
        ("'1e-5'", "1e-5"),
        ("[1, a, 1e-3]", [1, "a", 1e-3]),
        ("{a: 1, b: {c: x}}", {"a": 1, "b": {"c": "x"}}),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    got = read(text, "x")
    assert got == value
    assert type(got) is type(value)


def test_infinities_and_nan() -> None:
    assert read("[.inf, -.inf]", "x") == [math.inf, -math.inf]
    assert math.isnan(read(".nan", "x"))


@pytest.mark.parametrize("value", ["1e-5", "off", "yes", "12", "null", "~", "", "1_000", "0x1f", "true", "a: b", "- x"])
def test_strings_that_look_like_something_else_are_quoted(value: str) -> None:
    assert read(write({"k": value}), "x") == {"k": value}


def test_a_key_that_comes_twice_is_refused_at_any_depth() -> None:
    with pytest.raises(UserError, match=r"here, line 3, column 3: .*'b' comes twice \(first on line 2\)"):
        read("a:\n  b: 1\n  b: 2\n", "here")
    with pytest.raises(UserError, match="comes twice"):
        read("[{a: 1, a: 1}]", "here")


def test_deep_nesting_is_an_error_of_the_text() -> None:
    with pytest.raises(UserError, match="not valid YAML"):
        read("[" * 5000, "here")


def test_a_value_that_holds_itself_is_refused() -> None:
    with pytest.raises(UserError, match="aliases"):
        read("a: &x [*x]", "here")
