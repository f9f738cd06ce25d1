"""A worked example of programs that are run: the model writes a Python function, and gets the tests that fail.

The code runs in an interpreter of its own (isolated mode, an empty folder, limits of memory, time, file size and, for
users other than root, processes). It sees the calls of the tests, never what they should return. That keeps accidents
and simple tricks apart from the trainer; it is no jail for hostile code, which still reads files and the network.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from tranship.envs.env import Message, Step
from tranship.types import UserError

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_SHOWN = 3
_MAX_RESULT = 200
# It answers on a descriptor of its own, so that what the code prints is never taken for a result.
_RUNNER = """
import json, os, resource, sys
answers, memory_bytes, cpu_s = os.fdopen(int(sys.argv[1]), "w"), int(sys.argv[2]), int(sys.argv[3])
for name, most in (("AS", memory_bytes), ("CPU", cpu_s), ("FSIZE", 1 << 24), ("NPROC", 0)):
    limit = getattr(resource, "RLIMIT_" + name)
    hard = resource.getrlimit(limit)[1]
    resource.setrlimit(limit, (most,) * 2 if hard == resource.RLIM_INFINITY else (min(most, hard),) * 2)
task = json.load(sys.stdin)
results, names = [], {"__name__": "solution"}
try:
    exec(compile(task["code"], "solution.py", "exec"), names)
    error = None
except BaseException as fault:
    error = f"{type(fault).__name__}: {fault}"
for call in task["calls"]:
    if error is not None:
        break
    try:
        results.append({"value": json.loads(json.dumps(eval(call, names)))})
    except BaseException as fault:
        results.append({"error": f"{type(fault).__name__}: {fault}"})
json.dump({"error": error, "results": results}, answers)
answers.close()
os._exit(0)
"""


class Code:
    """The model's turn holds a block of Python (```python ... ```); the row's tests are run on the last one.

    A row's ground truth: {"tests": [{"call": "add(1, 2)", "value": 3}, ...]}, values in JSON. reward: of the turn that
    ends the sample, the share of tests that pass (all_or_nothing: 1.0 for all, else 0.0). max_tries: turns; the
    sample ends with the last, or once all tests pass. timeout_s: of one run, less than env.step_timeout_s.
    """

    tools = ()
    roles = ("user",)

    def __init__(
        self, max_tries: int = 3, timeout_s: float = 5.0, memory_bytes: int = 1 << 30, all_or_nothing: bool = False
    ) -> None:
        if max_tries < 1 or timeout_s <= 0:
            raise UserError(f"env code: max_tries {max_tries}, timeout_s {timeout_s:g}: use at least 1, and above 0")
        self._max_tries = max_tries
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._all_or_nothing = all_or_nothing
        self._tests: list[dict[str, Any]] = []
        self._tries = 0

    def reset(self, prompt_info: dict[str, Any], seed: int) -> list[Message]:
        """Take the row's tests."""
        tests = (prompt_info["ground_truth"] or {}).get("tests")
        if not isinstance(tests, list) or not tests or not all({"call", "value"} <= set(test) for test in tests):
            raise UserError('the ground truth has to be {"tests": [{"call": ..., "value": ...}, ...]}')
        self._tests = tests
        self._tries = 0
        return []

    def step(self, message: Message) -> Step:
        """Run the tests on the turn's last block of code, and say what failed."""
        self._tries += 1
        blocks = _BLOCK.findall(message["content"])
        passed, text = 0, "There is no block of Python code in the answer."
        if blocks:
            failed = self._failures(blocks[-1])
            passed = len(self._tests) - len(failed)
            text = "\n".join([f"{passed} of {len(self._tests)} tests pass.", *failed[:_SHOWN]])
        done = passed == len(self._tests) or self._tries >= self._max_tries
        share = passed / len(self._tests)
        reward = float(share == 1) if self._all_or_nothing else share
        info = {"tests_passed": passed, "tests": len(self._tests)}
        return Step([{"role": "user", "content": text}], reward if done else None, done, info)

    def _failures(self, code: str) -> list[str]:
        """A line of each test that fails."""
        calls = [test["call"] for test in self._tests]
        results = run_calls(code, calls, timeout_s=self._timeout_s, memory_bytes=self._memory_bytes)
        lines = []
        for test, result in zip(self._tests, results, strict=True):
            if "error" in result:
                lines.append(f"{test['call']}: {result['error'][:_MAX_RESULT]}")
            elif type(result["value"]) is not type(test["value"]) or result["value"] != test["value"]:
                lines.append(f"{test['call']} returned {json.dumps(result['value'])[:_MAX_RESULT]}")
        return lines


def run_calls(code: str, calls: Sequence[str], *, timeout_s: float, memory_bytes: int) -> list[dict[str, Any]]:
    """What each call gives after `code` was run: {value} (JSON) or {error}; {error} for all where the code fails."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as answers:
        number = answers.fileno()
        arguments = [str(number), str(memory_bytes), str(max(1, round(timeout_s) + 1))]
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _RUNNER, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[number],
            cwd=folder,
            env={"PYTHONHASHSEED": "0"},
        )
        try:
            process.communicate(json.dumps({"code": code, "calls": list(calls)}).encode(), timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return [{"error": f"timed out after {timeout_s:g} s"}] * len(calls)
        answers.seek(0)
        return _results(answers.read(), len(calls))


def _results(written: bytes, count: int) -> list[dict[str, Any]]:
    try:
        answer = json.loads(written)
        error, results = answer["error"], answer["results"]
    except (ValueError, KeyError, TypeError):
        return [{"error": "the program ended before its tests"}] * count
    if error is not None:
        return [{"error": str(error)}] * count
    good = isinstance(results, list) and len(results) == count
    return (
        results
        if good and all(isinstance(r, dict) and r.keys() & {"value", "error"} for r in results)
        else [{"error": "the program ended before its tests"}] * count
    )


_PROBLEMS: tuple[tuple[str, Sequence[tuple[str, Any]]], ...] = (
    ("add(a, b) that returns the sum of two numbers", [("add(1, 2)", 3), ("add(-4, 4)", 0), ("add(10, 5)", 15)]),
    ("is_even(n) that says whether a whole number is even", [("is_even(4)", True), ("is_even(7)", False)]),
    ("largest(items) that returns the largest item of a list", [("largest([3, 9, 2])", 9), ("largest([-5])", -5)]),
    ("reverse(text) that returns a string backwards", [("reverse('abc')", "cba"), ("reverse('')", "")]),
    ("count_vowels(text) that counts a, e, i, o and u", [("count_vowels('banana')", 3), ("count_vowels('xyz')", 0)]),
    ("factorial(n) that returns n factorial", [("factorial(0)", 1), ("factorial(5)", 120)]),
    ("squares(n) that returns the list of the squares of 1 to n", [("squares(3)", [1, 4, 9]), ("squares(0)", [])]),
    ("unique(items) that returns the different items, sorted", [("unique([2, 1, 2])", [1, 2]), ("unique([])", [])]),
)


def rows(split: str = "train") -> list[dict[str, Any]]:
    """Eight small problems in verl's schema: six for training, the last two for validation."""
    if split not in ("train", "val"):
        raise UserError(f"code rows: split is {split!r}: use train or val")
    chosen = _PROBLEMS[:-2] if split == "train" else _PROBLEMS[-2:]
    return [
        {
            "data_source": "code",
            "prompt": [{"role": "user", "content": f"Write a Python function {text}. Answer with one code block."}],
            "ability": "code",
            "reward_model": {
                "style": "tests",
                "ground_truth": {"tests": [{"call": call, "value": value} for call, value in tests]},
            },
            "extra_info": {"index": index},
        }
        for index, (text, tests) in enumerate(chosen)
    ]
