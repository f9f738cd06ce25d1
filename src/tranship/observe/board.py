"""A TensorBoard server beside the run: a child process on 127.0.0.1 that ends with its parent, however that ends.

Run as a program (`python -m tranship.observe.board LOGDIR PORT PARENT`) it is that child.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from tranship.types import UserError

_HOST = "127.0.0.1"
_LOOK_S = 0.5
_STOP_S = 5.0


def check_port(port: int) -> None:
    """Nothing if a server could listen on 127.0.0.1:port; UserError naming the port if not."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError as error:
            raise UserError(
                f"observe.tensorboard_port {port} cannot be used ({error.strerror}): choose another port, "
                "stop what listens there, or set it to null"
            ) from error


class BoardServer:
    """The child process. It shows what stands in RUN/tensorboard; its own words go to RUN/tensorboard.log."""

    def __init__(self, run_dir: Path, port: int) -> None:
        check_port(port)
        self.url = f"http://{_HOST}:{port}"
        command = [sys.executable, "-m", "tranship.observe.board", str(run_dir / "tensorboard"), str(port)]
        with (run_dir / "tensorboard.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, str(os.getpid())], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    def close(self) -> None:
        """Stop the child and wait for it, 5 s at most before it is killed."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _end_with(parent: int) -> None:
    """Let this process end within a second of `parent`. Looking works on every system, and for a parent whose starting
    thread ends earlier, where the kernel's parent-death signal would come too soon."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def _serve(logdir: str, port: str, parent: str) -> None:
    _end_with(int(parent))
    from tensorboard import default, program

    board = program.TensorBoard(default.get_plugins())
    # load_fast starts a data server of its own, which would outlive a killed TensorBoard.
    board.configure(("tensorboard", "--logdir", logdir, "--host", _HOST, "--port", port, "--load_fast", "false"))
    sys.exit(board.main())


if __name__ == "__main__":
    _serve(*sys.argv[1:])
