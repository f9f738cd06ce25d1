"""Payload for other nodes: a server that sends runs of slabs with sendfile, and receives blocks (`remote`: its client).

    request   count, then per run: slab, generation, offset, number of bytes
    answer    one byte per request: good or stale; if good, the bytes of all runs, one behind the other
    request   count 0, a number of slabs, then per slab: slab, generation ("are these still what they were?")
    answer    one byte: good or stale
    request   PUT, then a run to be written; once it is good, its bytes
    answer    one byte before the bytes, and one after them: good or stale

A reader asks the second question after the bytes have come: a slab's generation goes up before anybody writes into it
again, so bytes that were overwritten on their way are never handed on. A slab that was taken from its owner is never
given to another one, so what a late writer still sends reaches nobody. Runs and lengths are limited and checked against
the file before anything is sent; only files of the folder are opened, by number.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tranship.dock.block import ALIGNMENT
from tranship.dock.errors import StaleSlab
from tranship.dock.frames import (
    NONCE_BYTES,
    ConnectionLost,
    check_secret,
    close_listener,
    listen,
    new_secret,
    proof,
    proves,
    receive,
    receive_into,
    shut,
    tune,
)
from tranship.dock.slab import PAYLOAD_AT, check_generation, map_file, slab_path

_log = logging.getLogger(__name__)
COUNT = struct.Struct("<II")
RUN = struct.Struct("<QQQQ")
SLAB = struct.Struct("<QQ")
GOOD, STALE = b"\x01", b"\x00"
MAX_RUNS = 1 << 16
PUT = (0xFFFFFFFF, 1)
MAX_BYTES = 1 << 36
_GREETING_S = 10.0
_MAX_READERS = 512
_FILES_KEPT = 128
_MAPPED_KEPT = 16
SOCKET_BYTES = 4 << 20


class _Wanted(NamedTuple):
    slab: int
    generation: int
    offset: int
    nbytes: int


class RunServer:
    """Sends runs of the slabs in a folder to readers that know the secret; a thread per reader, which only waits."""

    def __init__(self, folder: str | Path, address: str, *, secret: bytes) -> None:
        self._folder = folder
        self._secret = check_secret(secret)
        self._listener, self.address = listen(address)
        self._streams: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False

    def start(self) -> RunServer:
        """Serve in threads from now on."""
        threading.Thread(target=self._accept, name="dock-runs", daemon=True).start()
        return self

    def close(self) -> None:
        """End every connection. A second call does nothing."""
        with self._lock:
            self._closed = True
            if self._listener.fileno() >= 0:
                close_listener(self._listener)
            for stream in self._streams:
                shut(stream)

    def _accept(self) -> None:
        while True:
            try:
                stream, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                continue
            with self._lock:
                if self._closed:
                    stream.close()
                    return
                if len(self._streams) >= _MAX_READERS:
                    stream.close()
                    continue
                self._streams.add(stream)
            threading.Thread(target=self._serve, args=(stream,), name="dock-runs", daemon=True).start()

    def _serve(self, stream: socket.socket) -> None:
        files = _Files(self._folder)
        try:
            stream.settimeout(_GREETING_S)
            if not self._greet(stream):
                _log.warning("a reader that does not know the run's secret was turned away")
                return
            stream.settimeout(None)
            while True:
                self._answer(stream, files)
        except ValueError as error:
            _log.warning("a reader's connection was ended: %s", error)
        except (ConnectionLost, OSError):
            return
        finally:
            files.close()
            with self._lock:
                self._streams.discard(stream)
            stream.close()

    def _greet(self, stream: socket.socket) -> bool:
        nonce = new_secret()
        stream.sendall(nonce)
        client_nonce = receive(stream, NONCE_BYTES)
        if not proves(receive(stream, 32), self._secret, b"client", nonce, client_nonce):
            return False
        stream.sendall(proof(self._secret, b"server", nonce, client_nonce))
        tune(stream)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        return True

    def _answer(self, stream: socket.socket, files: _Files) -> None:
        num_runs, num_slabs = COUNT.unpack(receive(stream, COUNT.size))
        if (num_runs, num_slabs) == PUT:
            self._store(stream, files)
            return
        if num_runs > MAX_RUNS or num_slabs > MAX_RUNS or bool(num_runs) == bool(num_slabs):
            raise ValueError(f"malformed message: {num_runs} runs and {num_slabs} slabs")
        if num_slabs:
            asked = list(SLAB.iter_unpack(receive(stream, SLAB.size * num_slabs)))
            stream.sendall(GOOD if files.are(asked) else STALE)
            return
        wanted = [_Wanted(*fields) for fields in RUN.iter_unpack(receive(stream, RUN.size * num_runs))]
        if sum(run.nbytes for run in wanted) > MAX_BYTES:
            raise ValueError(f"malformed message: more than {MAX_BYTES} bytes at once")
        if not files.are({(run.slab, run.generation) for run in wanted}):
            stream.sendall(STALE)
            return
        for run in wanted:
            if run.offset < PAYLOAD_AT or run.offset + run.nbytes > files.size(run.slab):
                raise ValueError(f"malformed message: {run} does not lie in its slab")
        stream.sendall(GOOD)
        for run in wanted:
            at, end, source = run.offset, run.offset + run.nbytes, files.descriptor(run.slab)
            while at < end:
                sent = os.sendfile(stream.fileno(), source, at, end - at)
                if not sent:
                    raise ConnectionLost("the slab's file ended")
                at += sent

    @staticmethod
    def _store(stream: socket.socket, files: _Files) -> None:
        """Receive a block straight into its slab."""
        run = _Wanted(*RUN.unpack(receive(stream, RUN.size)))
        slab = (run.slab, run.generation)
        if not files.are([slab]):
            stream.sendall(STALE)
            return
        if run.offset < PAYLOAD_AT or run.offset + run.nbytes > files.size(run.slab):
            raise ValueError(f"malformed message: {run} does not lie in its slab")
        memory = files.writable(run.slab)
        stream.sendall(GOOD)
        receive_into(stream, memory[run.offset : run.offset + run.nbytes])
        stream.sendall(GOOD if files.are([slab]) else STALE)


class _Files:
    """Open slabs of a folder."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = folder
        self._open: OrderedDict[int, int] = OrderedDict()
        self._writable: OrderedDict[int, memoryview] = OrderedDict()

    def descriptor(self, slab: int) -> int:
        """An open file. FileNotFoundError if it is gone."""
        descriptor = self._open.get(slab)
        if descriptor is None:
            descriptor = os.open(slab_path(self._folder, slab), os.O_RDONLY)
            self._open[slab] = descriptor
            if len(self._open) > _FILES_KEPT:
                os.close(self._open.popitem(last=False)[1])
        return descriptor

    def writable(self, slab: int) -> memoryview:
        """The memory of a slab, to be written into."""
        memory = self._writable.get(slab)
        if memory is None:
            memory = self._writable[slab] = map_file(slab_path(self._folder, slab), writable=True)
            if len(self._writable) > _MAPPED_KEPT:
                self._writable.popitem(last=False)
        return memory

    def size(self, slab: int) -> int:
        """Bytes of a slab, its header included."""
        return os.fstat(self.descriptor(slab)).st_size

    def are(self, asked: Sequence[tuple[int, int]] | set[tuple[int, int]]) -> bool:
        """Whether all of these slabs are in these generations."""
        for slab, generation in asked:
            try:
                head = os.pread(self.descriptor(slab), ALIGNMENT, 0)
                check_generation(memoryview(head), slab, generation)
            except (FileNotFoundError, StaleSlab, struct.error):
                return False
        return True

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()
        self._writable.clear()
