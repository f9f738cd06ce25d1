"""The TensorBoard server answers on loopback, and no way of ending leaves it behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tranship.config.schema import ObserveConfig
from tranship.observe.board import BoardServer, check_port
from tranship.observe.recorder import Recorder
from tranship.types import UserError


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def answers(port: int, within_s: float) -> bool:
    limit = time.monotonic() + within_s
    while time.monotonic() < limit:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/data/environment", timeout=2) as reply:
                return reply.status == 200
        except OSError:
            time.sleep(0.1)
    return False


def runs(pid: int) -> bool:
    """Whether the process is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_port_in_use_is_refused_and_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"tensorboard_port {port}"):
            check_port(port)
        (tmp_path / "metrics.jsonl").write_text('{"kind": "old"}\n')
        with pytest.raises(UserError, match=f"tensorboard_port {port}"):
            Recorder(tmp_path, ObserveConfig(console="off", tensorboard_port=port), total_steps=1)
        assert (tmp_path / "metrics.jsonl").read_text() == '{"kind": "old"}\n', "nothing was dropped"
    check_port(port)


def test_it_serves_and_stops(tmp_path: Path) -> None:
    port = free_port()
    board = BoardServer(tmp_path, port)
    try:
        assert answers(port, 60), (tmp_path / "tensorboard.log").read_text()
        assert board.url == f"http://127.0.0.1:{port}"
    finally:
        board.close()
    assert not runs(board.pid)
    check_port(port)


def test_it_ends_with_a_killed_parent(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from tranship.observe.board import BoardServer;"
        "print(BoardServer(Path(sys.argv[1]), int(sys.argv[2])).pid, flush=True); time.sleep(60)"
    )
    port = free_port()
    command = [sys.executable, "-c", program, str(tmp_path), str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert answers(port, 60), (tmp_path / "tensorboard.log").read_text()
        os.kill(parent.pid, signal.SIGKILL)
    limit = time.monotonic() + 10
    while runs(child) and time.monotonic() < limit:
        time.sleep(0.1)
    assert not runs(child)
