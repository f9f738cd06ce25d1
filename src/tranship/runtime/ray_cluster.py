"""A connection to Ray: to a cluster that runs already, or to one of our own that ends with this process."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import ray

from tranship.runtime.base import RuntimeOptions
from tranship.runtime.device import num_cores
from tranship.types import RunError, UserError

_FOLDER = "tranship-ray-"
_LEAST_STORE_BYTES = 80 << 20


def is_running(pid: int) -> bool:
    """Whether a process of this node runs (one that only waits to be reaped does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in "ZX"


def is_stopped(pid: int) -> bool:
    """Whether a process of this node is held by SIGSTOP."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


class Cluster:
    """A Ray cluster in use. owned: it was started here, lives on this node, and ends with `disconnect`."""

    def __init__(self, options: RuntimeOptions) -> None:
        if ray.is_initialized():
            raise RunError("this process is connected to a Ray cluster already: call ray.shutdown() first")
        self.owned = options.ray_address is None
        self.folder: Path | None = None
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        if options.ray_address is None:
            self._start(options)
        else:
            self._join(options.ray_address, options)

    def _start(self, options: RuntimeOptions) -> None:
        if options.object_store_bytes < _LEAST_STORE_BYTES:
            raise UserError(f"object_store_bytes {options.object_store_bytes} is too small: use {_LEAST_STORE_BYTES}")
        sweep_folders()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-"))
        ray.init(
            num_cpus=options.num_cores or num_cores(),
            object_store_memory=options.object_store_bytes,
            include_dashboard=False,
            log_to_driver=options.log_to_driver,
            logging_level=logging.ERROR,
            namespace="tranship",
            _node_ip_address="127.0.0.1",
            _temp_dir=str(self.folder),
        )

    def _join(self, address: str, options: RuntimeOptions) -> None:
        try:
            ray.init(
                address,
                log_to_driver=options.log_to_driver,
                logging_level=logging.ERROR,
                namespace="tranship",
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            first_line = str(error).splitlines()[0]
            raise UserError(
                f"placement.ray_address {address!r}: no Ray cluster answers there ({first_line}): "
                "start one with `ray start --head`, or leave ray_address out"
            ) from error

    def last_words(self, pid: int) -> str:
        """The end of what a process of this node wrote to its standard error; "" if nothing is known."""
        if self.folder is None:
            return ""
        lines: list[str] = []
        for file in self.folder.glob(f"session_latest/logs/worker-*-{pid}.err"):
            lines += file.read_text(errors="replace").splitlines()
        return "\n".join(line for line in lines if line.strip() and not line.startswith(":"))[-4000:]

    def disconnect(self, pids: list[int], timeout_s: float) -> None:
        """Leave the cluster; if it is our own, end it, and make sure that `pids` are gone from this node."""
        ray.shutdown()
        if not self.owned:
            return
        deadline = time.monotonic() + timeout_s
        while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
            time.sleep(0.02)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert self.folder is not None
        shutil.rmtree(self.folder, ignore_errors=True)


def sweep_folders() -> None:
    """Remove the folders of clusters whose driver was killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*-*"):
        pid = folder.name.removeprefix(_FOLDER).partition("-")[0]
        if pid.isdigit() and not is_running(int(pid)) and folder.stat().st_uid == os.getuid():
            shutil.rmtree(folder, ignore_errors=True)
