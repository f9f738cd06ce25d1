"""A side runs in a process of its own: its report and memory come back, and no way of ending leaves it behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tranship.bench.children import run_child
from tranship.types import RunError

REPORTS = """
import json, sys
spec = json.load(open(sys.argv[1]))
json.dump({"twice": 2 * spec["x"]}, open(spec["report"], "w"))
"""


def program(tmp_path: Path, text: str) -> list[str]:
    file = tmp_path / "program.py"
    file.write_text(text)
    return [sys.executable, str(file)]


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_report_and_the_peak_of_the_whole_tree(tmp_path: Path) -> None:
    text = (
        "import subprocess, sys, time\n"
        "child = [sys.executable, '-c', 'import time; x = bytearray(64 << 20); time.sleep(3)']\n"
        "child = subprocess.Popen(child); x = bytearray(64 << 20); time.sleep(2.5); child.wait()\n" + REPORTS
    )
    report = run_child(program(tmp_path, text), {"x": 21}, tmp_path / "child", 60)
    assert report.values == {"twice": 42}
    assert report.peak_bytes > 140 << 20
    assert report.started_at <= time.time()


def test_a_failure_says_the_last_lines(tmp_path: Path) -> None:
    command = program(tmp_path, "raise SystemExit('the model is not there')")
    with pytest.raises(RunError, match=r"(?s)program.py failed \(exit 1\).*the model is not there"):
        run_child(command, {}, tmp_path / "child", 60)


def test_a_child_without_a_report_failed(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="failed"):
        run_child(program(tmp_path, "pass"), {}, tmp_path / "child", 60)


def test_a_child_that_takes_too_long_is_killed_with_its_children(tmp_path: Path) -> None:
    text = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "open(sys.argv[1] + '.pid', 'w').write(str(child.pid)); time.sleep(60)"
    )
    began = time.monotonic()
    with pytest.raises(RunError, match="took longer than 3 s"):
        run_child(program(tmp_path, text), {}, tmp_path / "child", 3)
    assert time.monotonic() - began < 20
    grandchild = int((tmp_path / "child" / "spec.json.pid").read_text())
    limit = time.monotonic() + 5
    while runs(grandchild) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not runs(grandchild)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal")
def test_a_killed_benchmark_takes_its_child_along(tmp_path: Path) -> None:
    child = program(tmp_path, "import os, sys, time; print(os.getpid(), flush=True); time.sleep(60)")
    bench = (
        "import sys; from pathlib import Path; from tranship.bench.children import run_child\n"
        f"run_child({json.dumps(child)}, {{}}, Path({str(tmp_path / 'child')!r}), 60)"
    )
    log = tmp_path / "child" / "output.log"
    with subprocess.Popen([sys.executable, "-c", bench]) as process:
        limit = time.monotonic() + 60
        while not (log.exists() and log.read_text().strip()) and time.monotonic() < limit:
            time.sleep(0.05)
        pid = int(log.read_text())
        assert runs(pid)
        os.kill(process.pid, signal.SIGKILL)
    limit = time.monotonic() + 10
    while runs(pid) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not runs(pid)
