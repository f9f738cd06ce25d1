"""A dock that other processes reach over sockets: one thread, one message after the other, nobody waits for anybody.

A take (or a slab) that cannot be had now is parked, not refused: it is tried again when something has changed, answered
empty when its time is over, and costs nothing in between. A client whose connection ends is retired: what it had on
lease goes back at once. One that is silent (stopped, or cut off) loses its leases when they are over. What a stranger
sends reaches nobody: each connection first proves the run's secret (`frames`), and a malformed message ends its own
connection and no other.
"""

from __future__ import annotations

import logging
import resource
import selectors
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple, Protocol

from tranship.dock.dock import Dock
from tranship.dock.durable import DurableDock
from tranship.dock.frames import (
    LENGTH,
    MAX_FRAME,
    NONCE_BYTES,
    PROOF_BYTES,
    check_secret,
    close_listener,
    listen,
    new_secret,
    proof,
    proves,
    tune,
)
from tranship.dock.place import Place
from tranship.dock.wire import MAX_TEXT, Request, decode_request, encode_failure, encode_place

_log = logging.getLogger(__name__)
_GREETING_S = 10.0
_MAX_CONNECTIONS, _MAX_STRANGERS = 4096, 128
_SPARE_FILES = 128
_CHUNK = 1 << 16


@dataclass(eq=False)
class _Connection:
    """One client. name: once it has said it. nonce: of the greeting. until: when the greeting must be over.

    inbox: bytes that have come. outbox: bytes that the client has not taken yet; while there are any, the selector
    tells when it takes more. parked: its message that waits.
    """

    stream: socket.socket
    nonce: bytes
    until: float
    is_known: bool = False
    name: str | None = None
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)
    parked: _Parked | None = None


_Signature = tuple[Any, ...]


class Served(Protocol):
    """What a service has to know of the dock that it serves."""

    seq: int

    def next_deadline(self) -> float | None:
        """When the next lease is over if nobody speaks, by time.monotonic; None if there is no lease."""
        ...


class Runner(Protocol):
    """Runs the messages of clients, as DurableDock does."""

    @property
    def dock(self) -> Served:
        """The dock that the messages change."""
        ...

    def run(self, name: str, ticket: int, request: Request, body: bytes, *, waiting: bool) -> bytes | None:
        """The reply to a client's message; None if it gives nothing, and would rather wait."""
        ...

    def forget(self, name: str) -> None:
        """A client is gone for good: what it had goes back."""
        ...


class _Parked(NamedTuple):
    """A message that waits for a change. frame: as it came. signature: equal for messages of which one gives nothing
    when another does."""

    request: Request
    frame: bytes
    signature: _Signature


class DockService:
    """Serves a dock at some addresses ("unix:PATH", "tcp:HOST:PORT") until it is closed. A DurableDock outlives its
    process: a successor serves it again, and clients that may reconnect go on.

    secret: at least 16 bytes that every client must know (None: a fresh one, see `secret`). place: where the payload
    can be had (None: what the dock says, for readers of this node only; a Runner that is no DurableDock needs one).
    `run` serves in the calling thread, `start` in one of its own.
    """

    def __init__(
        self,
        dock: Dock | Runner,
        addresses: Sequence[str],
        *,
        secret: bytes | None = None,
        place: Place | None = None,
    ) -> None:
        self.secret = check_secret(secret) if secret is not None else new_secret()
        self._runner: Runner = DurableDock.of(dock) if isinstance(dock, Dock) else dock
        self._dock = self._runner.dock
        if place is None:
            assert isinstance(self._dock, Dock), "where is the payload?"
            place = Place.of_folder(self._dock.payload_folder())
        self._place = place
        self._selector = selectors.DefaultSelector()
        self._listeners: list[socket.socket] = []
        self.addresses: list[str] = []
        for address in addresses:
            listener, bound = listen(address)
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, None)
            self._listeners.append(listener)
            self.addresses.append(bound)
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._woken)
        self._connections: dict[_Connection, None] = {}
        self._strangers: dict[_Connection, None] = {}
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max_connections = max(_MAX_STRANGERS, min(_MAX_CONNECTIONS, files - _SPARE_FILES))
        self._parked: dict[_Signature, dict[_Connection, None]] = {}
        self._due: list[tuple[float, int, _Connection, _Parked | None]] = []
        self._numbers = count()
        self._names: Counter[str] = Counter()
        self._posted: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self) -> DockService:
        """Serve in a thread of its own from now on."""
        self._thread = threading.Thread(target=self.run, name="dock-service", daemon=True)
        self._thread.start()
        return self

    def run(self) -> None:
        """Serve until `close` is called from another thread."""
        seq = self._dock.seq
        while not self._stopping:
            for key, events in self._selector.select(self._timeout()):
                if key.data is None:
                    self._accept(key.fileobj)  # type: ignore[arg-type]
                elif isinstance(key.data, _Connection):
                    self._turn(key.data, events)
                else:
                    self._woken.recv(_CHUNK)
            while self._posted:
                self._posted.popleft()()
            seq = self._try_parked(seq)
        for connection in list(self._connections):
            self._drop(connection, retire=False)
        for listener in self._listeners:
            close_listener(listener)
        self._selector.close()

    def post(self, change: Callable[[], None]) -> None:
        """Have something done to the dock between two messages, in the thread that serves. From any thread."""
        self._posted.append(change)
        self._wake.send(b"x")

    def stop(self) -> None:
        """Stop serving soon: every client finds its connection closed. From any thread, also the one that serves."""
        self._stopping = True
        self._wake.send(b"x")

    def close(self) -> None:
        """Stop serving: every client finds its connection closed. The dock itself stays."""
        self.stop()
        if self._thread is not None:
            self._thread.join()

    # Connections

    def _accept(self, listener: socket.socket) -> None:
        """All who wait at a listener."""
        while True:
            try:
                stream, _ = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                _log.warning("the dock could not accept a connection: %s", error)
                return
            self._meet(stream)

    def _meet(self, stream: socket.socket) -> None:
        if len(self._connections) >= self._max_connections:
            stream.close()
            return
        if len(self._strangers) >= _MAX_STRANGERS:
            self._drop(next(iter(self._strangers)))
        stream.setblocking(False)
        tune(stream)
        connection = _Connection(stream, new_secret(), time.monotonic() + _GREETING_S)
        assert len(connection.nonce) == NONCE_BYTES
        self._connections[connection] = self._strangers[connection] = None
        heappush(self._due, (connection.until, next(self._numbers), connection, None))
        self._selector.register(stream, selectors.EVENT_READ, connection)
        self._send(connection, connection.nonce)

    def _drop(self, connection: _Connection, *, retire: bool = True) -> None:
        """A connection is over; what its client had goes back when it was the last one of that name."""
        if connection not in self._connections:
            return
        del self._connections[connection]
        self._strangers.pop(connection, None)
        self._leave_parking(connection)
        self._selector.unregister(connection.stream)
        connection.stream.close()
        if connection.name is not None:
            self._names[connection.name] -= 1
            if retire and not self._names[connection.name]:
                self._runner.forget(connection.name)

    def _turn(self, connection: _Connection, events: int) -> None:
        """What a client's socket is ready for."""
        if events & selectors.EVENT_WRITE:
            self._flush(connection)
        if events & selectors.EVENT_READ and connection in self._connections:
            try:
                data = connection.stream.recv(_CHUNK)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                data = b""
            if not data:
                self._drop(connection)
                return
            if self._is_message(connection, data):
                self._handle(connection, data[LENGTH.size :])
            else:
                connection.inbox += data
                self._read(connection)

    @staticmethod
    def _is_message(connection: _Connection, data: bytes) -> bool:
        """Whether some bytes are exactly the next message of a client: nearly always so."""
        is_next = not connection.inbox and not connection.outbox and connection.parked is None
        if connection.name is None or not is_next or len(data) < LENGTH.size:
            return False
        return LENGTH.unpack_from(data)[0] == len(data) - LENGTH.size

    def _read(self, connection: _Connection) -> None:
        """Work on what has come, message by message."""
        while connection in self._connections and connection.parked is None and not connection.outbox:
            if not connection.is_known:
                if len(connection.inbox) < PROOF_BYTES:
                    break
                self._greet(connection, self._cut(connection, PROOF_BYTES))
                continue
            if len(connection.inbox) < LENGTH.size:
                break
            (length,) = LENGTH.unpack_from(connection.inbox)
            limit = MAX_FRAME if connection.name is not None else MAX_TEXT
            if length > limit:
                self._refuse(connection, f"malformed message: a frame of {length} bytes, and the limit is {limit}")
                return
            if len(connection.inbox) < LENGTH.size + length:
                break
            frame = self._cut(connection, LENGTH.size + length)[LENGTH.size :]
            if connection.name is None:
                self._name(connection, frame)
            else:
                self._handle(connection, frame)
        if connection.parked is not None and connection.inbox:
            self._refuse(connection, "malformed message: more messages while one is waited for")

    def _greet(self, connection: _Connection, answer: bytes) -> None:
        client_nonce, shown = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
        if not proves(shown, self.secret, b"client", connection.nonce, client_nonce):
            _log.warning("somebody who does not know the run's secret was turned away")
            self._drop(connection)
            return
        connection.is_known = True
        del self._strangers[connection]
        self._send(connection, proof(self.secret, b"server", connection.nonce, client_nonce))

    def _name(self, connection: _Connection, frame: bytes) -> None:
        try:
            name = frame.decode()
        except UnicodeDecodeError:
            self._refuse(connection, "malformed message: a name that is no text")
            return
        connection.name = name
        self._names[name] += 1
        self._send_frame(connection, encode_place(self._place))

    def _refuse(self, connection: _Connection, words: str) -> None:
        """End a connection that does not keep to the format."""
        _log.warning("the connection of %s was ended: %s", connection.name, words)
        self._send_frame(connection, encode_failure(ValueError(words)))
        self._drop(connection)

    # Messages

    def _handle(self, connection: _Connection, frame: bytes) -> None:
        try:
            request = decode_request(frame)
        except ValueError as error:
            self._refuse(connection, str(error))
            return
        assert connection.name is not None
        answer = self._runner.run(connection.name, request.ticket, request, frame, waiting=request.wait_s > 0)
        if answer is None:
            self._park(connection, request, frame)
        else:
            self._send_frame(connection, answer)

    def _try(self, connection: _Connection, parked: _Parked, *, waiting: bool) -> bytes | None:
        """The reply to a parked message; None if it still gives nothing, and is to wait on."""
        assert connection.name is not None
        return self._runner.run(connection.name, parked.request.ticket, parked.request, parked.frame, waiting=waiting)

    def _park(self, connection: _Connection, request: Request, frame: bytes) -> None:
        """Keep a message until it can be served; what it acknowledged is done already."""
        said = {name: value for name, value in request.arguments.items() if name != "done"}
        asked = tuple(item for item in said.items() if item[0] not in ("reader", "owner", "giving_up"))
        parked = _Parked(request._replace(arguments=said), frame, (request.method, *asked))
        connection.parked = parked
        self._parked.setdefault(parked.signature, {})[connection] = None
        heappush(self._due, (time.monotonic() + request.wait_s, next(self._numbers), connection, parked))

    def _leave_parking(self, connection: _Connection) -> None:
        if connection.parked is not None:
            waiting = self._parked[connection.parked.signature]
            del waiting[connection]
            if not waiting:
                del self._parked[connection.parked.signature]
            connection.parked = None

    def _try_parked(self, seq: int) -> int:
        """Try what is parked again if the dock has changed since `seq`, and end what has waited for long enough.

        Of messages that ask for the same only the first is tried, until it is served. Returns the new seq.
        """
        now = time.monotonic()
        deadline = self._dock.next_deadline()
        while self._parked and (self._dock.seq != seq or (deadline is not None and deadline <= now)):
            seq, deadline = self._dock.seq, None
            for signature in list(self._parked):
                while waiting := self._parked.get(signature):
                    connection = next(iter(waiting))
                    assert connection.parked is not None
                    answer = self._try(connection, connection.parked, waiting=True)
                    if answer is None:
                        break
                    self._unpark(connection, answer)
        while self._due and self._due[0][0] <= now:
            _, _, connection, parked = heappop(self._due)
            if parked is None and connection.name is None:
                self._drop(connection)
            elif parked is not None and connection.parked is parked:
                answer = self._try(connection, parked, waiting=False)
                assert answer is not None
                self._unpark(connection, answer)
        return self._dock.seq if not self._parked else seq

    def _unpark(self, connection: _Connection, answer: bytes) -> None:
        self._leave_parking(connection)
        self._send_frame(connection, answer)
        self._read(connection)

    def _timeout(self) -> float | None:
        """Seconds until something is due without anybody's message; None if nothing is."""
        due = [self._due[0][0]] if self._due else []
        deadline = self._dock.next_deadline() if self._parked else None
        if deadline is not None:
            due.append(deadline)
        return max(0.0, min(due) - time.monotonic()) if due else None

    # Bytes

    @staticmethod
    def _cut(connection: _Connection, count: int) -> bytes:
        data = bytes(connection.inbox[:count])
        del connection.inbox[:count]
        return data

    def _send_frame(self, connection: _Connection, body: bytes) -> None:
        """Answer, unless the service stops: a client whose message met that finds its connection closed."""
        if self._stopping:
            return
        self._send(connection, LENGTH.pack(len(body)) + body)

    def _send(self, connection: _Connection, data: bytes) -> None:
        if connection not in self._connections:
            return
        if connection.outbox:
            connection.outbox += data
            return
        sent = self._sent(connection, data)
        if sent is not None and sent < len(data):
            connection.outbox += memoryview(data)[sent:]
            self._selector.modify(connection.stream, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)

    def _flush(self, connection: _Connection) -> None:
        """The client is ready for more: send what it takes, and go on with its messages when it has taken all."""
        sent = self._sent(connection, connection.outbox)
        if sent is None:
            return
        del connection.outbox[:sent]
        if not connection.outbox:
            self._selector.modify(connection.stream, selectors.EVENT_READ, connection)
            self._read(connection)

    def _sent(self, connection: _Connection, data: bytes | bytearray) -> int | None:
        """How many bytes the client takes now; None if it is gone."""
        try:
            return connection.stream.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            self._drop(connection)
            return None
