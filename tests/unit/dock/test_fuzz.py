"""Bytes that reach new code are refused or understood, and never anything else; with coverage as the guide.

Longer: `TRANSHIP_FUZZ_RUNS=100000 pytest tests/unit/dock/test_fuzz.py`.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.unit.dock.fuzz_targets import TARGETS
from tests.unit.dock.guided_fuzzer import fuzz

RUNS = int(os.environ.get("TRANSHIP_FUZZ_RUNS", "400"))
ATHERIS_S = 2


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_what_is_guided_by_coverage_finds_nothing(tmp_path, name):
    target = TARGETS[name](tmp_path)
    try:
        found = fuzz(target.run, target.seeds, runs=RUNS // target.cost)
    finally:
        target.close()
    assert len(found.edges) > 10


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_atheris_finds_nothing(tmp_path, name):
    if importlib.util.find_spec("atheris") is None:
        pytest.skip("atheris is not installed: it comes with the dev extra where it has a build (Linux on x86-64)")
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.dock.fuzz_with_atheris", name, str(tmp_path), str(ATHERIS_S)],
        capture_output=True,
        text=True,
        timeout=60 + 2 * ATHERIS_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Done" in done.stderr


def test_the_guided_fuzzer_finds_what_is_wrong_and_says_with_which_input():
    """A decoder with a fault behind three bytes that must come one after the other; only the dock's own code guides,
    so the fault is put into it."""
    from tranship.dock import block

    source = "def read(data):\n" + "".join(
        f"{'    ' * (depth + 1)}if len(data) > {depth} and data[{depth}] == {value}:\n"
        for depth, value in enumerate(b"dock")
    )
    scope: dict = {}
    exec(compile(source + "    " * 5 + "raise KeyError('deep')\n", block.__file__, "exec"), scope)
    with pytest.raises(KeyError, match="deep") as caught:
        fuzz(scope["read"], [b"none"], runs=100_000)
    assert caught.value.__notes__[0].startswith("input: b'dock")
