"""Frames on a stream socket: four bytes of length, then that many bytes. Lengths are checked before memory is taken.

Also what comes before the first frame of a connection: both ends prove that they know the run's secret, which itself
never crosses the wire (HMAC-SHA256 over two fresh nonces, RFC 2104; the answers of the two ends differ, so that none
can be sent back). It keeps strangers out; it does not hide what is sent.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import struct
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

from tranship.types import RunError, UserError

LENGTH = struct.Struct("<I")
MAX_FRAME = 64 << 20
_FIRST_BYTES = 1 << 16
_TIMEVAL = struct.Struct("@ll")
NONCE_BYTES = 32
PROOF_BYTES = NONCE_BYTES + hashlib.sha256().digest_size
MIN_SECRET_BYTES = 16
_UNIX, _TCP = "unix:", "tcp:"


class ConnectionLost(RunError):
    """The other end is gone, or never was there."""


def new_secret() -> bytes:
    """A fresh secret for one run."""
    return secrets.token_bytes(32)


def check_secret(secret: bytes) -> bytes:
    """The secret. UserError if it is too short to be one."""
    if len(secret) < MIN_SECRET_BYTES:
        raise UserError(f"the dock's secret has {len(secret)} bytes: give it at least {MIN_SECRET_BYTES}")
    return secret


def proof(secret: bytes, side: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """32 bytes that only a holder of the secret can compute. side: b"client" or b"server"."""
    return hmac.new(secret, side + server_nonce + client_nonce, hashlib.sha256).digest()


def proves(answer: bytes, secret: bytes, side: bytes, server_nonce: bytes, client_nonce: bytes) -> bool:
    """Whether an answer is that proof, compared in constant time."""
    return hmac.compare_digest(answer, proof(secret, side, server_nonce, client_nonce))


def listen(address: str) -> tuple[socket.socket, str]:
    """A listening socket, and the address that clients use. UserError for an address that cannot be bound.

    address: "unix:PATH" (only this user can connect) or "tcp:HOST:PORT" (port 0: any free one).
    """
    kind, where = _parse(address)
    listener = socket.socket(socket.AF_UNIX if kind == _UNIX else _family(where), socket.SOCK_STREAM)
    try:
        if isinstance(where, str):
            _remove_left_over(where)
            mask = os.umask(0o177)
            try:
                listener.bind(where)
            finally:
                os.umask(mask)
        else:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise UserError(f"the dock cannot listen at {address}: {error.strerror}; use another address") from error
    if isinstance(where, str):
        return listener, address
    return listener, f"{_TCP}{where[0]}:{listener.getsockname()[1]}"


def connect(address: str, secret: bytes, limit_s: float) -> socket.socket:
    """A connection whose two ends know the secret. ConnectionLost if there is none within the limit."""
    kind, where = _parse(address)
    stream = socket.socket(socket.AF_UNIX if kind == _UNIX else _family(where), socket.SOCK_STREAM)
    try:
        if kind == _UNIX:
            # Else a full backlog is an error at once, not a wait.
            set_limit(stream, limit_s)
        else:
            stream.settimeout(limit_s)
        stream.connect(where)
        set_limit(stream, limit_s)
        tune(stream)
        server_nonce = receive(stream, NONCE_BYTES)
        client_nonce = secrets.token_bytes(NONCE_BYTES)
        send(stream, client_nonce + proof(secret, b"client", server_nonce, client_nonce))
        answer = receive(stream, PROOF_BYTES - NONCE_BYTES)
        if not proves(answer, secret, b"server", server_nonce, client_nonce):
            raise ConnectionLost(f"{address} does not know the run's secret: another run listens there")
    except (OSError, ConnectionLost) as error:
        stream.close()
        if isinstance(error, ConnectionLost) and "another run" in str(error):
            raise
        raise ConnectionLost(f"no connection to the dock at {address}: {error}") from error
    return stream


def tune(stream: socket.socket) -> None:
    """Of a TCP connection: send at once, and find out within half a minute that the other end's machine is gone.

    Within one machine there is no network to be gentle to, and what paces a sender (BBR) only slows it down there.
    """
    if stream.family == socket.AF_UNIX:
        return
    if hasattr(socket, "TCP_CONGESTION"):
        with suppress(OSError):
            if ip_address(stream.getpeername()[0].partition("%")[0]).is_loopback:
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def set_limit(stream: socket.socket, limit_s: float) -> None:
    """How long one call may wait on a socket, which stays blocking: the kernel counts, and no call looks first."""
    stream.settimeout(None)
    limit = _TIMEVAL.pack(int(limit_s), int(limit_s % 1 * 1e6))
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def send(stream: socket.socket, data: bytes | memoryview) -> None:
    """Send all of it. TimeoutError if the other end takes nothing within the limit."""
    try:
        stream.sendall(data)
    except BlockingIOError as error:
        raise TimeoutError("the other end takes nothing") from error


def receive(stream: socket.socket, count: int) -> bytes:
    """Exactly so many bytes. ConnectionLost if the stream ends before; `count` has been checked by the caller."""
    data = bytearray(count)
    receive_into(stream, memoryview(data))
    return bytes(data)


def receive_into(stream: socket.socket, out: memoryview) -> None:
    """Fill `out` (bytes). ConnectionLost if the stream ends before, TimeoutError if nothing comes within the limit."""
    while len(out):
        try:
            got = stream.recv_into(out, 0, socket.MSG_WAITALL)
        except BlockingIOError as error:
            raise TimeoutError("the other end sends nothing") from error
        if not got:
            raise ConnectionLost("the other end has closed the connection")
        out = out[got:]


def send_frame(stream: socket.socket, body: bytes) -> None:
    """Send one frame."""
    send(stream, LENGTH.pack(len(body)) + body)


def receive_frame(stream: socket.socket, limit: int = MAX_FRAME) -> bytes:
    """The only frame that is under way. ValueError if it is longer than the limit (nothing has been allocated for it
    then), or if something follows it."""
    try:
        data = stream.recv(_FIRST_BYTES)
    except BlockingIOError as error:
        raise TimeoutError("the other end sends nothing") from error
    if len(data) < LENGTH.size:
        data += receive(stream, LENGTH.size - len(data)) if data else receive(stream, LENGTH.size)
    (length,) = LENGTH.unpack_from(data)
    if length > limit:
        raise ValueError(f"malformed message: a frame of {length} bytes, and the limit is {limit}")
    missing = LENGTH.size + length - len(data)
    if missing < 0:
        raise ValueError(f"malformed message: {-missing} bytes after a frame of {length}")
    return data[LENGTH.size :] + (receive(stream, missing) if missing else b"")


def node_of(folder: str | Path) -> str:
    """Names the memory that holds a folder: equal where the same boot of the same machine sees the same file system."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    text = boot.read_text().strip() if boot.exists() else socket.gethostname()
    try:
        return f"{text}/{os.stat(folder).st_dev}"
    except OSError:
        return f"{text}/none"


def close_listener(listener: socket.socket) -> None:
    """Close a listening socket, on which a thread may be waiting, and remove its file."""
    path = listener.getsockname() if listener.family == socket.AF_UNIX else ""
    shut(listener)
    if path:
        Path(path).unlink(missing_ok=True)


def shut(stream: socket.socket) -> None:
    """Close a socket on which another thread may be waiting."""
    try:
        stream.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    stream.close()


def _remove_left_over(path: str) -> None:
    """Remove a socket's file whose process is gone: nobody answers there."""
    if not Path(path).is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink(missing_ok=True)


def _parse(address: str) -> tuple[str, str | tuple[str, int]]:
    if address.startswith(_UNIX) and len(address) > len(_UNIX):
        return _UNIX, address[len(_UNIX) :]
    host, _, port = address[len(_TCP) :].rpartition(":")
    if address.startswith(_TCP) and host and port.isdigit() and int(port) < 1 << 16:
        return _TCP, (host.strip("[]"), int(port))
    raise UserError(f"{address!r} is no address of a dock: use unix:PATH or tcp:HOST:PORT")


def _family(where: str | tuple[str, int]) -> socket.AddressFamily:
    return socket.AF_INET6 if isinstance(where, tuple) and ":" in where[0] else socket.AF_INET
