"""A connection to Ray: to a cluster that runs already, or to one of our own that ends with this process."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import ray
from ray._private import ray_constants, services

from tranship.runtime import guard
from tranship.runtime.base import RuntimeOptions
from tranship.runtime.device import num_cores
from tranship.runtime.processes import descendants, end_all, is_running
from tranship.types import RunError, UserError

_FOLDER = "tshipray-"
_LEAST_STORE_BYTES = 80 << 20
_LOOPBACK = "127.0.0.1"
_GRACE_S = 3.0
_START_LIMIT_S = 45.0
_CONNECT_S = 3.0
# A socket's path may have 107 bytes; Ray's part of it and our folder's name take 90.
_LONGEST_FOLDER = 17


class Cluster:
    """A Ray cluster in use. owned: it was started here, lives on this node, and ends with `disconnect`.

    A cluster of our own listens on the loopback interface alone. When this process is killed, Ray's daemons die with
    it but some of their helpers do not: a guard process ends those.
    """

    def __init__(self, options: RuntimeOptions) -> None:
        if ray.is_initialized():
            raise RunError("this process is connected to a Ray cluster already: call ray.shutdown() first")
        self.owned = options.ray_address is None
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        if options.ray_address is None:
            self._start(options)
        else:
            _join(options.ray_address, options)

    def _start(self, options: RuntimeOptions) -> None:
        if options.object_store_bytes < _LEAST_STORE_BYTES:
            raise UserError(f"object_store_bytes {options.object_store_bytes} is too small: use {_LEAST_STORE_BYTES}")
        sweep_folders()
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-", dir=_short_folder()))
        command = [sys.executable, "-I", "-S", guard.__file__, str(self._folder)]
        self._guard = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)
        self._daemons: set[int] = set()
        os.environ[guard.MARK] = str(self._folder)
        before = descendants(os.getpid())
        # Where one of its daemons dies at the wrong moment, Ray may wait for it without end.
        late = threading.Timer(_START_LIMIT_S, lambda: end_all(descendants(os.getpid()) - before, 0.0))
        late.daemon = True
        late.start()
        try:
            with _loopback():
                ray.init(
                    num_cpus=options.num_cores or num_cores(),
                    object_store_memory=options.object_store_bytes,
                    include_dashboard=False,
                    log_to_driver=options.log_to_driver,
                    logging_level=logging.ERROR,
                    namespace="tranship",
                    _node_ip_address=_LOOPBACK,
                    _temp_dir=str(self._folder),
                )
        finally:
            late.cancel()
            self._daemons = descendants(os.getpid()) - before
            self.watch_over_all()
            if not ray.is_initialized():
                self.disconnect()
        if ray.util.get_node_ip_address() != _LOOPBACK:
            warnings.warn(
                f"Ray {ray.__version__} listens on {ray.util.get_node_ip_address()}, not on {_LOOPBACK} alone",
                stacklevel=2,
            )

    def watch_over_all(self) -> None:
        """Tell the guard of every process that belongs to the cluster now."""
        if not self.owned or self._guard.stdin is None or self._guard.poll() is not None:
            return
        for pid in self._members():
            if started := guard.start_time(pid):
                self._guard.stdin.write(f"{pid} {started}\n")
        self._guard.stdin.flush()

    def _members(self) -> set[int]:
        return self._daemons | descendants(*self._daemons)

    def last_words(self, pid: int) -> str:
        """The end of what a process of this node wrote to its standard error; "" if nothing is known."""
        lines: list[str] = []
        for file in self._folder.glob(f"session_latest/logs/worker-*-{pid}.err") if self.owned else ():
            lines += file.read_text(errors="replace").splitlines()
        return "\n".join(line for line in lines if line.strip() and not line.startswith(":"))[-4000:]

    def disconnect(self) -> None:
        """Leave the cluster; if it is our own, end it, and return when none of its processes runs."""
        members = self._members() if self.owned else set()
        ray.shutdown()
        if not self.owned:
            return
        end_all(members, _GRACE_S)
        # Helpers of a daemon that died are nobody's children now.
        end_all(guard.members(str(self._folder)), _GRACE_S)
        os.environ.pop(guard.MARK, None)
        self._guard.communicate("done\n", timeout=10)
        shutil.rmtree(self._folder, ignore_errors=True)


def _join(address: str, options: RuntimeOptions) -> None:
    refusal = f"placement.ray_address {address!r}: no Ray cluster answers there (%s): start one with " + (
        "`ray start --head`, or leave ray_address out"
    )
    try:
        where = services.get_ray_address_from_environment("auto", None) if address == "auto" else address
        host, colon, port = (where or "").rpartition(":")
        if not (colon and port.isdigit() and "/" not in host):
            raise UserError(f"placement.ray_address {address!r} is not an address: use HOST:PORT, or auto")
        # Ray itself waits for minutes where nothing listens.
        with _loopback() if _is_local(host, int(port)) else nullcontext():
            ray.init(where, log_to_driver=options.log_to_driver, logging_level=logging.ERROR, namespace="tranship")
    except UserError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(refusal % str(error).splitlines()[0]) from error


def _is_local(host: str, port: int) -> bool:
    """Whether a cluster listens on the loopback interface alone. OSError if nothing listens at the address."""
    socket.create_connection((host, port), timeout=_CONNECT_S).close()
    if not socket.gethostbyname(host).startswith("127."):
        return False
    try:
        socket.create_connection((ray.util.get_node_ip_address(), port), timeout=_CONNECT_S).close()
    except OSError:
        return True
    return False


@contextmanager
def _loopback() -> Iterator[None]:
    """Let Ray use a loopback address as it is, which it replaces by that of the network where clusters are allowed."""
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _short_folder() -> str:
    """Where temporary files go, or /tmp if that path is too long for the sockets that Ray puts below it."""
    folder = tempfile.gettempdir()
    return folder if len(folder) <= _LONGEST_FOLDER else "/tmp"


def sweep_folders() -> None:
    """Remove the folders of clusters whose driver is gone, and end what is left of them where their guard died too."""
    for folder in Path(_short_folder()).glob(f"{_FOLDER}*-*"):
        pid = folder.name.removeprefix(_FOLDER).partition("-")[0]
        if pid.isdigit() and not is_running(int(pid)) and folder.stat().st_uid == os.getuid():
            end_all(guard.members(str(folder)), 0.0)
            shutil.rmtree(folder, ignore_errors=True)
