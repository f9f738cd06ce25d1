"""A worked example with one tool: a calculator for arithmetic that a small model cannot do in its head."""

from __future__ import annotations

import ast
import json
import operator
import random
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from tranship.envs.tools import ToolEnv, ToolError
from tranship.types import UserError

_BINARY: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_MAX_CHARACTERS = 200
_MAX_DIGITS = 50
_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")


class Calculator(ToolEnv):
    """The model may call `calculate` any number of times; its first turn without a call is its answer.

    reward: 1.0 where the last number of the answer is the row's ground truth, else 0.0. call_reward: given once for a
    sample that has calculated without an error, so that a model learns to call before it learns to answer.
    """

    def __init__(self, call_reward: float = 0.0) -> None:
        self.tools = [self.calculate]
        self._call_reward = call_reward
        self._truth = ""
        self._calculated = False

    def begin(self, prompt_info: dict[str, Any], seed: int) -> None:
        """Note the sample's ground truth."""
        self._truth = str(prompt_info["ground_truth"])
        self._calculated = False

    def calculate(self, expression: str) -> str:
        """Calculate an arithmetic expression and return its value.

        Args:
            expression: numbers, + - * / and parentheses, such as (12 + 30) * 7
        """
        value = calculate(expression)
        self._calculated = True
        return str(value.numerator) if value.denominator == 1 else f"{float(value):.12g}"

    def finish(self, answer: str) -> float:
        """1.0 for the right number, 0.0 for another or none; and the reward of having calculated."""
        numbers = _NUMBER.findall(answer)
        right = bool(numbers) and Fraction(numbers[-1].replace(",", "")) == Fraction(self._truth)
        return float(right) + (self._call_reward if self._calculated else 0.0)


def calculate(expression: str) -> Fraction:
    """The exact value of an arithmetic expression, which is parsed, not run. Raises ToolError for anything else."""
    if len(expression) > _MAX_CHARACTERS:
        raise ToolError(f"the expression has {len(expression)} characters: use at most {_MAX_CHARACTERS}")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        return _value(tree.body)
    except ZeroDivisionError as error:
        raise ToolError("division by zero") from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ToolError(f"{expression!r} is no arithmetic expression") from error


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        value = _BINARY[type(node.op)](_value(node.left), _value(node.right))
        if max(abs(value.numerator), value.denominator) >= 10**_MAX_DIGITS:
            raise ToolError(f"a number of the expression has more than {_MAX_DIGITS} digits")
        return value
    raise ToolError(f"{type(node).__name__} is not allowed: use numbers, + - * / and parentheses")


def rows(
    count: int = 512, low: int = 100, high: int = 999, seed: int = 0, num_terms: int = 2, shots: int = 0
) -> list[dict[str, Any]]:
    """Rows "What is A * B?", with products, sums and differences of numbers low..high, drawn from `seed`.

    Another seed gives other rows (a few may be equal): use one for training and another for validation. shots: solved
    questions that each prompt begins with, always the same ones; a small model calls a tool once it has seen it done.
    """
    for name, value, least in (
        ("count", count, 1),
        ("num_terms", num_terms, 2),
        ("high", high, low),
        ("shots", shots, 0),
    ):
        if value < least:
            raise UserError(f"calculator rows: {name} is {value}: use at least {least}")
    examples_rng, rng = random.Random(-1), random.Random(seed)
    examples = [message for _ in range(shots) for message in _example(_expression(examples_rng, low, high, num_terms))]
    return [_row(_expression(rng, low, high, num_terms), index, examples) for index in range(count)]


def _expression(rng: random.Random, low: int, high: int, num_terms: int) -> str:
    expression = str(rng.randint(low, high))
    for _ in range(num_terms - 1):
        expression += f" {rng.choice('+-*')} {rng.randint(low, high)}"
    return expression


def _example(expression: str) -> list[dict[str, str]]:
    call, value = {"name": "calculate", "arguments": {"expression": expression}}, str(calculate(expression))
    return [
        {"role": "user", "content": f"What is {expression}?"},
        {"role": "assistant", "content": f"<tool_call>\n{json.dumps(call)}\n</tool_call>"},
        {"role": "tool", "content": value},
        {"role": "assistant", "content": f"{expression} = {value}"},
    ]


def _row(expression: str, index: int, examples: list[dict[str, str]]) -> dict[str, Any]:
    return {
        "data_source": "calculator",
        "prompt": [*examples, {"role": "user", "content": f"What is {expression}?"}],
        "ability": "tools",
        "reward_model": {"style": "rule", "ground_truth": str(calculate(expression))},
        "extra_info": {"index": index, "expression": expression},
    }
