"""Chosen steps leave a trace and a table; others leave nothing, and do not even import torch."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import torch

from tranship.observe.profile import Profiler


def work(size: int) -> None:
    matrix = torch.ones(size, size)
    (matrix @ matrix).sum()


def test_a_chosen_step_is_written_and_no_other(tmp_path: Path) -> None:
    profiler = Profiler(tmp_path, "train/0", (2,))
    paths = []
    for step in (1, 2, 3):
        profiler.begin(step)
        profiler.begin(step)
        work(8)
        paths.append(profiler.end(step))
    assert paths[0] is None
    assert paths[2] is None
    assert paths[1] == tmp_path / "profile" / "step-2-train-0.json.gz"
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == [
        "step-2-train-0.json.gz",
        "step-2-train-0.txt",
    ]
    with gzip.open(paths[1], "rt") as file:
        trace = json.load(file)
    names = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "cpu_op"]
    assert names.count("aten::mm") == 1, "begun twice, recorded once, and nothing of the steps beside it"
    assert "aten::mm" in (tmp_path / "profile" / "step-2-train-0.txt").read_text()


def test_a_step_that_is_never_ended_is_written_by_the_next_or_at_the_end(tmp_path: Path) -> None:
    profiler = Profiler(tmp_path, "w", (1, 2))
    profiler.begin(1)
    assert profiler.end(7) is None, "not the step that is recorded"
    work(4)
    profiler.begin(2)
    assert (tmp_path / "profile" / "step-1-w.json.gz").exists()
    work(4)
    path = profiler.close()
    assert path is not None
    assert path.name == "step-2-w.json.gz"
    assert profiler.close() is None


def test_without_chosen_steps_torch_is_not_imported(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tranship.observe.profile import Profiler;"
        f"p = Profiler(Path({str(tmp_path)!r}), 'w', (3,)); p.begin(1); p.end(1); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    assert list(tmp_path.iterdir()) == []
