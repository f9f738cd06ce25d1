"""The worked examples: what their tools do, what they pay, and that their rows fit them."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tranship.data.rows import to_row
from tranship.envs import ToolError, calculator, code, search
from tranship.envs.calculator import Calculator, calculate
from tranship.envs.code import Code, run_calls
from tranship.envs.search import Corpus, Search
from tranship.envs.tools import parse_tool_calls
from tranship.types import UserError


def step(env: Any, text: str) -> Any:
    return env.step({"role": "assistant", "content": text, "tool_calls": parse_tool_calls(text), "finish_reason": ""})


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


NUMBERS = st.integers(0, 999).map(str) | st.decimals(0, 99, places=2, allow_nan=False).map(str)
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda parts: f"({' '.join(parts)})"),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(EXPRESSIONS)
def test_the_calculator_is_exact(expression: str) -> None:
    floating = eval(expression)
    assert float(calculate(expression)) == pytest.approx(floating, rel=1e-9, abs=1e-9)


def test_the_calculator_divides_and_negates() -> None:
    assert calculate(" -(1 / 3) * 3 ") == -1
    assert calculate("0.1 + 0.2") == Fraction(3, 10)
    env = Calculator()
    assert env.calculate("1 / 3") == "0.333333333333"
    assert env.calculate("123456789 * 1000000007") == str(123456789 * 1000000007)


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1 +",
        "1 / 0",
        "2 ** 10",
        "__import__('os')",
        "abs(1)",
        "a",
        "'x' * 9",
        "True + 1",
        "1 if 1 else 2",
        "1e400",
        "(" * 150 + "1",
        "1+" * 150 + "1",
        "10000000000 * 10000000000 * 10000000000 * 10000000000 * 10000000000 * 10000000000",
        "1\x00",
        "1j",
    ],
)
def test_the_calculator_takes_nothing_but_arithmetic(expression: str) -> None:
    with pytest.raises(ToolError):
        calculate(expression)


def test_the_calculator_pays_for_the_right_last_number() -> None:
    env = Calculator(call_reward=0.25)
    env.reset({"ground_truth": "1234"}, 0)
    assert step(env, "It is 1,234.").reward == 1.0
    assert step(env, "Not 1234 but 1235").reward == 0.0
    assert step(env, "no number").reward == 0.0
    assert "Error" in step(env, call("calculate", expression="1 +")).messages[0]["content"]
    assert step(env, "1234").reward == 1.0
    assert step(env, call("calculate", expression="2 * 617")).messages[0]["content"] == "1234"
    assert step(env, "1234").reward == 1.25
    env.reset({"ground_truth": "1"}, 0)
    assert step(env, "1").reward == 1.0


@pytest.mark.parametrize(
    "rows", [calculator.rows(20), search.rows(), search.rows("val"), code.rows(), code.rows("val")]
)
def test_rows_are_rows(rows: list[dict[str, Any]]) -> None:
    assert len({to_row(row, "here").prompt[-1]["content"] for row in rows}) >= len(rows) - 1


def test_calculator_rows_are_what_they_say() -> None:
    rows = calculator.rows(50, seed=1, num_terms=3)
    assert rows == calculator.rows(50, seed=1, num_terms=3) != calculator.rows(50, seed=2, num_terms=3)
    for row in rows:
        assert eval(row["extra_info"]["expression"]) == int(row["reward_model"]["ground_truth"])
    (shown,) = calculator.rows(1, shots=2)
    assert [message["role"] for message in shown["prompt"]] == ["user", "assistant", "tool", "assistant"] * 2 + ["user"]
    (asked,) = parse_tool_calls(shown["prompt"][1]["content"])
    assert str(calculate(asked["arguments"]["expression"])) == shown["prompt"][2]["content"]
    assert shown["prompt"][-1] == calculator.rows(1)[0]["prompt"][0]
    with pytest.raises(UserError, match="count is 0"):
        calculator.rows(0)


def test_search_ranks_rare_words_first() -> None:
    corpus = Corpus(["the cat and the dog", "the the the the", "a zebra, the end", "nothing here"])
    assert corpus.search("the zebra", 2) == ["a zebra, the end", "the the the the"]
    assert corpus.search("ZEBRA?", 9) == ["a zebra, the end"]
    assert corpus.search("unicorn", 3) == []
    assert corpus.search("", 3) == []


def test_every_question_can_be_answered_by_one_search() -> None:
    env = Search(search_reward=0.5)
    rows = search.rows() + search.rows("val")
    assert len(rows) == len(search.facts()) == 64
    for row in rows:
        truth = row["reward_model"]["ground_truth"]
        env.reset({"ground_truth": truth}, 0)
        found = step(env, call("search", query=row["prompt"][0]["content"])).messages[0]["content"]
        assert truth in found
        assert step(env, f"That would be {truth.upper()}!").reward == 1.5
        assert step(env, f"x{truth}x").reward == 0.5
    assert env.search("unicorn") == "Nothing was found."


def test_a_corpus_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("Bread is baked.\n\nTea is brewed.\n")
    env = Search(str(tmp_path / "corpus.txt"), results=1)
    assert env.search("what is brewed is tea") == "Tea is brewed."
    with pytest.raises(UserError, match="there is no file"):
        Search(str(tmp_path / "none.txt"))


TESTS = {"tests": [{"call": "f(1)", "value": 2}, {"call": "f([])", "value": None}]}


def test_code_that_passes_ends_with_its_reward() -> None:
    env = Code()
    env.reset({"ground_truth": TESTS}, 0)
    said = step(env, "```python\ndef f(x):\n    print('noise')\n    return x + 1 if x else None\n```")
    assert (said.reward, said.done, said.info) == (1.0, True, {"tests_passed": 2, "tests": 2})


def test_code_that_fails_is_told_what_it_gave_and_never_what_was_wanted() -> None:
    env = Code(max_tries=2)
    env.reset({"ground_truth": TESTS}, 0)
    said = step(env, "I think\n```\ndef f(x): return x * 1000\n```")
    assert said.messages == [{"role": "user", "content": "0 of 2 tests pass.\nf(1) returned 1000\nf([]) returned []"}]
    assert (said.reward, said.done) == (None, False)
    last = step(env, "```py\ndef f(x): return 2\n```")
    assert (last.reward, last.done) == (0.5, True)
    strict = Code(max_tries=1, all_or_nothing=True)
    strict.reset({"ground_truth": TESTS}, 0)
    assert step(strict, "```py\ndef f(x): return 2\n```").reward == 0.0
    env.reset({"ground_truth": TESTS}, 0)
    assert step(env, "no code").messages[0]["content"] == "There is no block of Python code in the answer."


def test_a_true_is_not_a_one() -> None:
    env = Code(max_tries=1)
    env.reset({"ground_truth": {"tests": [{"call": "f()", "value": True}]}}, 0)
    assert step(env, "```py\ndef f(): return 1\n```").reward == 0.0


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("def f(:", "SyntaxError"),
        ("raise ValueError('no')", "ValueError: no"),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("import os; os._exit(0)", "the program ended before its tests"),
        ("while True: pass", "timed out after 1 s"),
        ("held = [bytearray(1 << 30) for _ in range(9)]", "MemoryError"),
        (
            "import os\nfor n in range(3, 64):\n  try: os.write(n, b'[]')\n  except OSError: pass\nos._exit(0)",
            "the program",
        ),
        ("open('x', 'wb').write(b'0' * (1 << 26))", "OSError"),
    ],
)
def test_code_that_misbehaves_fails_all_tests(text: str, error: str) -> None:
    for result in run_calls(text, ["1", "2"], timeout_s=1.0, memory_bytes=1 << 29):
        assert error in result["error"]


def test_a_call_that_fails_fails_alone() -> None:
    results = run_calls("def f(x): return 1 / x", ["f(0)", "f(1)", "g()", "{1}"], timeout_s=5.0, memory_bytes=1 << 29)
    assert results[0] == {"error": "ZeroDivisionError: division by zero"}
    assert results[1] == {"value": 1.0}
    assert results[2] == {"error": "NameError: name 'g' is not defined"}
    assert "not JSON serializable" in results[3]["error"]


def test_code_rows_have_solutions() -> None:
    solutions = {
        "add": "def add(a, b): return a + b",
        "factorial": "def factorial(n): return 1 if n < 2 else n * factorial(n - 1)",
        "squares": "def squares(n): return [k * k for k in range(1, n + 1)]",
        "unique": "def unique(items): return sorted(set(items))",
    }
    for row in code.rows() + code.rows("val"):
        name = row["prompt"][0]["content"].split("function ")[1].split("(")[0]
        if name in solutions:
            env = Code(max_tries=1)
            env.reset({"ground_truth": row["reward_model"]["ground_truth"]}, 0)
            assert step(env, f"```python\n{solutions[name]}\n```").reward == 1.0
