"""The reward for programs: the response's last block of Python code is run against tests, within limits."""

from __future__ import annotations

import base64
import json
import math
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tranship.types import UserError

_SANDBOX = Path(__file__).with_name("sandbox.py")
_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([A-Za-z0-9_+.-]*)[^\n`]*$", re.MULTILINE)
_PYTHON = ("python", "python3", "py")
_START_S = 10.0
_PROBE = """
import decimal, heapq, json, os, socket
assert os.listdir(".") == []
open("probe", "w").close()
try:
    socket.create_connection(("127.0.0.1", 9), 1).close()
    print("network")
except ConnectionRefusedError:
    print("network")
except OSError:
    print("none")
"""


@dataclass(frozen=True)
class CodeTest:
    """One test. code: run after the response's (None: the response is a program). stdout: what it has to print then."""

    code: str | None
    stdin: str = ""
    stdout: str = ""


@dataclass(frozen=True)
class Outcome:
    """How a test ended. ended: "exit N", "signal N" or "timeout"."""

    passed: bool
    ended: str


class RunCode:
    """The share of tests that the response's code passes: its last block fenced as Python (or as nothing).

    ground_truth: a list of tests (or JSON text of one), each either Python code that raises where the answer is wrong
    ("assert add(1, 2) == 3", run after the response's code, in the same process) or {"input": text, "output": text}
    (the code is a program; its output is compared line by line, without spaces at the ends of lines); or {"inputs":
    [...], "outputs": [...]}. partial: the share of tests passed, else 1 if all are and 0 if not. Examples for two
    asserts of which one holds: 0.5, partial=false 0; no block of code: 0 and well_formed 0. Extra: passed (share),
    timeouts (number).

    Every test has a process of its own (Linux), in namespaces of its own: no network, no other process to be seen, the
    file system read-only but for an empty folder in memory, no environment variables and no files of this process.
    (Sockets in the file system outside /run stay open to code that runs as an account that may connect to them.)
    test_timeout_s: of one test. timeout_s: of all; keep it below reward.timeout_s. When it is over, the rest has failed
    if a test had been over its own limit, else the sample is invalid. memory_mb: address space of each process.
    max_file_mb: of one file and of the output; all files together have four times as much. max_processes: processes and
    threads besides the first. Run by root, the code runs as an account that owns nothing, which may read all files if
    Python itself lies where only root can read.

    Where namespaces are not allowed (some containers), this is refused at start, unless allow_network is true: then the
    code may use the network, and without namespaces may also read and write what this account can, within the other
    limits. Tests share a process with the code they test: code that searches its memory for them can cheat.
    """

    def __init__(
        self,
        partial: bool = True,
        test_timeout_s: float = 3.0,
        timeout_s: float = 8.0,
        memory_mb: int = 1024,
        max_file_mb: int = 4,
        max_processes: int = 16,
        allow_network: bool = False,
    ) -> None:
        for name, value in (("test_timeout_s", test_timeout_s), ("timeout_s", timeout_s), ("memory_mb", memory_mb)):
            if not 0 < value < math.inf:
                raise UserError(f"{name} {value} must be above 0")
        if test_timeout_s >= timeout_s:
            raise UserError(
                f"test_timeout_s {test_timeout_s} must be below timeout_s {timeout_s}, the limit of all tests"
            )
        if not sys.platform.startswith("linux"):
            raise UserError("run_code needs Linux, whose limits it uses")
        self._partial = partial
        self._test_timeout_s = test_timeout_s
        self._timeout_s = timeout_s
        self._job = {
            "memory_bytes": memory_mb << 20,
            "file_bytes": max_file_mb << 20,
            "disk_bytes": 4 * max_file_mb << 20,
            "num_processes": max_processes,
            "network": allow_network,
            "isolate": True,
        }
        self._check(allow_network)

    def __call__(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
    ) -> dict[str, float]:
        """The score of a response. Raises ValueError where ground_truth holds no tests."""
        tests = parse_tests(ground_truth)
        code = last_code(solution_str)
        if code is None:
            return {"score": 0.0, "well_formed": 0.0, "passed": 0.0, "timeouts": 0.0}
        outcomes = self._run_all(code, tests)
        share = sum(outcome.passed for outcome in outcomes) / len(tests)
        return {
            "score": share if self._partial else float(share == 1.0),
            "well_formed": 1.0,
            "passed": share,
            "timeouts": float(sum(outcome.ended == "timeout" for outcome in outcomes)),
        }

    def _run_all(self, code: str, tests: Sequence[CodeTest]) -> list[Outcome]:
        """The outcomes of the tests that count; those that are missing have failed."""
        deadline = time.monotonic() + self._timeout_s
        outcomes: list[Outcome] = []
        for test in tests:
            left = max(deadline - time.monotonic(), 0.0)
            outcome = self._run(code, test, min(left, self._test_timeout_s)) if left else Outcome(False, "timeout")
            if outcome.ended == "timeout" and left < self._test_timeout_s:
                if any(earlier.ended == "timeout" for earlier in outcomes):
                    return outcomes
                raise TimeoutError(
                    f"{len(outcomes)} of {len(tests)} tests ran in {self._timeout_s:g} s: give fewer, or raise "
                    "timeout_s and reward.timeout_s"
                )
            outcomes.append(outcome)
            if not self._partial and not outcome.passed:
                return outcomes
        return outcomes

    def _run(self, code: str, test: CodeTest, timeout_s: float) -> Outcome:
        answer = self._ask(code, test, timeout_s)
        if "error" in answer:
            raise RuntimeError(f"run_code could not set its limits: {answer['error']}")
        if test.code is not None:
            return Outcome(answer["passed"] and answer["ended"] == "exit 0", answer["ended"])
        printed = base64.b64decode(answer["stdout"]).decode("utf-8", "replace")
        return Outcome(answer["ended"] == "exit 0" and _lines(printed) == _lines(test.stdout), answer["ended"])

    def _ask(self, code: str, test: CodeTest, timeout_s: float) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="tranship-code-") as folder:
            job = {
                **self._job,
                "code": code,
                "test": test.code,
                "stdin": test.stdin,
                "secret": secrets.token_hex(16),
                "folder": folder,
                "timeout_s": timeout_s,
            }
            done = subprocess.run(
                [sys.executable, "-I", "-B", str(_SANDBOX)],
                input=json.dumps(job).encode(),
                capture_output=True,
                env={
                    "PATH": "/usr/bin:/bin",
                    "LANG": "C.UTF-8",
                    "HOME": folder,
                    "TMPDIR": folder,
                    "OMP_NUM_THREADS": "1",
                },
                cwd="/",
                timeout=timeout_s + _START_S,
                check=False,
            )
        if done.returncode != 0 or not done.stdout:
            last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            return {"error": f"its process ended with code {done.returncode}: {last}"}
        return json.loads(done.stdout)

    def _check(self, allow_network: bool) -> None:
        answer = self._ask(_PROBE, CodeTest(None), _START_S)
        if "error" in answer and allow_network:
            self._job["isolate"] = False
            answer = self._ask(_PROBE, CodeTest(None), _START_S)
        if "error" in answer:
            remedy = (
                ""
                if allow_network
                else ": allow user namespaces here, or set allow_network: true to run code without them"
            )
            raise UserError(f"code cannot be isolated on this machine ({answer['error']}){remedy}")
        found = base64.b64decode(answer["stdout"]).decode(errors="replace").strip()
        if answer["ended"] != "exit 0" or (found != "none" and not allow_network):
            raise UserError(f"code does not run in isolation on this machine (a trial ended with {answer['ended']})")


def last_code(text: str) -> str | None:
    """The content of the last fenced block that is marked as Python, else of the last unmarked one; None without one.

    A block that is never closed does not count.
    """
    marked = unmarked = None
    opened: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opened is None:
            opened = fence
        elif fence[2] == "" and fence[1].startswith(opened[1]):
            content = text[opened.end() + 1 : fence.start()]
            language = opened[2].lower()
            if language in _PYTHON:
                marked = content
            elif language == "":
                unmarked = content
            opened = None
    return unmarked if marked is None else marked


def parse_tests(ground_truth: Any) -> list[CodeTest]:
    """The tests that a row's ground truth holds, at least one. Raises ValueError naming what is wrong."""
    value = ground_truth
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = [value]
    if isinstance(value, Mapping) and {"inputs", "outputs"} <= set(value):
        if len(value["inputs"]) != len(value["outputs"]):
            raise ValueError(f"ground_truth has {len(value['inputs'])} inputs and {len(value['outputs'])} outputs")
        value = [
            {"input": given, "output": wanted} for given, wanted in zip(value["inputs"], value["outputs"], strict=True)
        ]
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ValueError(f"ground_truth {ground_truth!r:.80} holds no tests")
    return [_test(entry) for entry in value]


def _test(entry: Any) -> CodeTest:
    if isinstance(entry, str):
        return CodeTest(entry)
    if isinstance(entry, Mapping) and isinstance(entry.get("input"), str) and isinstance(entry.get("output"), str):
        return CodeTest(None, entry["input"], entry["output"])
    raise ValueError(f"a test is neither code nor an input and an output: {entry!r:.80}")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
