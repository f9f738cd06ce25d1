"""Tensor parallel: one engine of several ranks, each a `NativeEngine` in a process of its own that holds its part.

The first rank leads: it is the `RolloutEngine` that a stage uses, and it tells the others what it is told, before it
does the same. So all of them have the same samples in the same slots, and take part in the same collectives. What is
told goes over a connection of its own, whose two ends prove that they know one secret: a rank that is gone is noticed
there, whatever it was doing.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from secrets import token_bytes
from typing import Any

import numpy as np

from tranship.rollout.around import EngineAround
from tranship.rollout.engine import GroupRequest, RankLost, RolloutEngine, SamplesFailed
from tranship.rollout.native import told
from tranship.rollout.native.engine import NativeEngine
from tranship.rollout.native.ranks import Ranks
from tranship.types import Response, RunError, SampleId

UPDATE_S = 600.0
"""So long the others may take to write the weights of an update and to get them ready."""
_CAUSE_S = 2.0
"""So long after a collective has failed, another rank may still say why."""
_MOST_WAITING = 16


@dataclass(frozen=True)
class Door:
    """Where a rank waits for its leader, and the secret that the leader must know."""

    address: tuple[str, int]
    secret: bytes


@dataclass(frozen=True)
class _Words:
    """What a rank says to its leader: it has finished an update, failed, or missed another rank. gone: it says nothing
    any more."""

    kind: str
    text: str = ""


_WORDS = dict.fromkeys(("done", "failed", "lost"), (told.text,))
_METHODS = {
    "meet": (told.text, told.whole),
    "submit": (told.request,),
    "step": (told.whole, told.whole, told.whole),
    "abort": (told.samples,),
    "fill": (told.text,),
    "finish_update": (told.whole,),
    "probe": (told.token_ids, told.real),
    **dict.fromkeys(("begin_update", "sleep", "wake_up", "end"), ()),
}


class LeadingEngine(EngineAround):
    """`RolloutEngine` of several ranks, as the first of them. `lead` must come before anything else.

    engine: the first rank's. host: the address of this process for the others. The engine's `pieces` and `storage` are
    those of the first rank; the others fill their own when `fill` says so. Any method raises RankLost if another rank
    is gone, and RunError with its words if it has failed: then the engine cannot go on. `abort` and `peek` alone still
    work, for they need no other rank.
    """

    def __init__(self, engine: NativeEngine, ranks: Ranks, host: str) -> None:
        super().__init__(engine)
        self._ranks = ranks
        self._host = host
        self._others: list[Connection] = []
        self._error: RunError | None = None
        self._filled = False

    def lead(self, doors: Sequence[Door]) -> None:
        """Meet the other ranks, given in their order."""
        assert len(doors) == self._ranks.share.size - 1, f"{len(doors)} doors for {self._ranks.share.size} ranks"
        port, store = self._ranks.open(self._host)
        try:
            self._others = [Client(door.address, authkey=door.secret) for door in doors]
        except (OSError, EOFError, AuthenticationError) as error:
            raise self._fail(RankLost(f"a rank of the rollout engine cannot be reached: {error}")) from error
        self._tell("meet", self._host, port)
        self._do(lambda: self._ranks.meet(store, self._host))

    def check(self) -> None:
        """Raises what another rank has to say of its end, between two calls. It costs next to nothing."""
        if self._error is not None:
            raise self._error
        for rank, other in enumerate(self._others, 1):
            said = _hear(other, 0.0)
            if said is not None:
                raise self._fail(self._cause({rank: said}) or _gone(rank))

    def close(self) -> None:
        """Let the other ranks end."""
        self._tell_if_possible("end")
        self._ranks.close()
        for other in self._others:
            other.close()

    def submit(self, request: GroupRequest) -> None:
        """See `RolloutEngine.submit`. What is refused here never reaches the others."""
        self._engine.submit(request)
        self._tell("submit", request)

    def step(self) -> list[Response]:
        """See `RolloutEngine.step`."""
        # Without weights the first rank raises, and the others have nothing to do.
        if self._engine.num_unfinished and self.policy_version >= 0:
            self._tell("step", *state_of(self._engine))
        return self._do(self._engine.step)

    def abort(self, samples: Sequence[SampleId] | None = None) -> list[Response]:
        """See `RolloutEngine.abort`. That a rank is gone is raised by the next step."""
        self._tell_if_possible("abort", samples)
        return self._engine.abort(samples)

    def begin_update(self) -> None:
        self._tell("begin_update")
        self._engine.begin_update()
        self._filled = False

    def fill(self, name: str) -> None:
        """Between begin_update and finish_update: the other ranks write the weights called `name`, as each was made
        to."""
        self._tell("fill", name)
        self._filled = True

    def finish_update(self, policy_version: int) -> None:
        """See `RolloutEngine.finish_update`. Returns when every rank is ready."""
        assert self._filled, "the other ranks were given no weights: fill comes before finish_update"
        self._tell("finish_update", policy_version)
        self._engine.finish_update(policy_version)
        for rank, other in enumerate(self._others, 1):
            self._await_done(rank, other)

    def probe(self, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        if self.policy_version >= 0:
            self._tell("probe", token_ids, float(temperature))
        return self._do(lambda: self._engine.probe(token_ids, temperature))

    def sleep(self) -> None:
        self._engine.sleep()
        self._tell("sleep")

    def wake_up(self) -> None:
        self._engine.wake_up()
        self._tell("wake_up")

    def _tell(self, method: str, *args: Any) -> None:
        if self._error is not None:
            raise self._error
        assert self._others, f"{method} before lead"
        words = told.pack(method, *args)
        for rank, other in enumerate(self._others, 1):
            try:
                other.send_bytes(words)
            except OSError as error:
                raise self._fail(self._cause() or _gone(rank)) from error

    def _tell_if_possible(self, method: str, *args: Any) -> None:
        """What ends work is done here whether the others hear of it or not; they may never have been met."""
        if self._others:
            with suppress(RunError):
                self._tell(method, *args)

    def _do(self, run: Callable[[], Any]) -> Any:
        """The first rank's part of what has been told to all."""
        try:
            return run()
        except RankLost as error:
            raise self._fail(self._cause() or error) from error

    def _await_done(self, rank: int, other: Connection) -> None:
        said = _hear(other, UPDATE_S)
        if said is None:
            raise self._fail(RankLost(f"rank {rank} of the rollout engine was not ready after {UPDATE_S:g} s"))
        if said.kind != "done":
            raise self._fail(self._cause({rank: said}) or _gone(rank))

    def _cause(self, heard: Mapping[int, _Words] | None = None) -> RunError | None:
        """Why another rank takes part no more, if one says so soon. heard: what some have said already."""
        words = dict(heard or {})
        deadline = time.monotonic() + _CAUSE_S
        while True:
            for rank, other in enumerate(self._others, 1):
                said = words[rank] if rank in words else _hear(other, 0.0)
                if said is None or said.kind == "done":
                    continue
                words[rank] = said
                if said.kind == "failed":
                    return RunError(f"rank {rank} of the rollout engine has failed: {said.text}")
                if said.kind == "gone":
                    return _gone(rank)
            if len(words) == len(self._others) or time.monotonic() > deadline:
                return None
            time.sleep(0.05)

    def _fail(self, error: RunError) -> RunError:
        """From now on the engine raises this. The others' collectives fail at once."""
        self._error = self._error or error
        self._ranks.close()
        return self._error


class FollowingEngine:
    """A rank other than the first: it does what the leader says. `poll` is called again and again, on one thread.

    wakeup: set when there is something to do. fill(name) writes the weights of that name into the engine's storages, or
    says False: they are not there yet, and it is asked again at the next `poll`.
    """

    def __init__(
        self,
        engine: NativeEngine,
        ranks: Ranks,
        host: str,
        *,
        wakeup: threading.Event,
        fill: Callable[[str], bool],
    ) -> None:
        self._engine = engine
        self._ranks = ranks
        self._host = host
        self._wakeup = wakeup
        self._fill = fill
        self._leader: Connection | None = None
        self._told: deque[tuple[str, tuple[Any, ...]]] = deque()
        self._leader_gone = False
        self._ended = False
        self._listener = Listener((host, 0), backlog=_MOST_WAITING)
        self.door = Door(self._listener.address, token_bytes(32))
        threading.Thread(target=self._accept, name="door", daemon=True).start()

    def poll(self) -> bool:
        """Do what has been said; returns whether anything was done. Raises RankLost if the leader is gone."""
        if self._ended:
            return False
        try:
            if self._leader_gone and ("end", ()) not in self._told:
                raise RankLost("the first rank of the rollout engine is gone: all of its ranks must be started again")
            if not self._told or not self._do(*self._told[0]):
                return False
        except BaseException as error:
            self._ended = True
            lost = isinstance(error, RankLost)
            self._say(_Words("lost" if lost else "failed", f"{type(error).__name__}: {error}"))
            self._ranks.close()
            raise
        self._told.popleft()
        return True

    @property
    def ended(self) -> bool:
        """Whether there is nothing to do any more."""
        return self._ended

    def close(self) -> None:
        """The leader hears that this rank is gone."""
        self._ended = True
        self._ranks.close()
        self._listener.close()
        if self._leader is not None:
            self._leader.close()

    def _accept(self) -> None:
        """Open to whoever comes until the leader has come. Each is heard in a thread of its own: a stranger that says
        nothing holds up nobody."""
        try:
            while self._leader is None:
                with suppress(ConnectionError):
                    guest = self._listener.accept()
                    threading.Thread(target=self._listen, args=(guest,), name="leader", daemon=True).start()
        except OSError:
            self._hear_no_more()

    def _listen(self, guest: Connection) -> None:
        """Take what the leader says until it is gone; who does not know the secret is sent away."""
        try:
            deliver_challenge(guest, self.door.secret)
            answer_challenge(guest, self.door.secret)
        except (AuthenticationError, EOFError, OSError, ValueError):
            guest.close()
            return
        self._leader = guest
        try:
            while True:
                self._told.append(told.unpack(guest.recv_bytes(told.MAX_BYTES), _METHODS))
                self._wakeup.set()
        except (EOFError, OSError, ValueError):
            self._hear_no_more()

    def _hear_no_more(self) -> None:
        self._leader_gone = True
        self._wakeup.set()

    def _do(self, method: str, args: tuple[Any, ...]) -> bool:
        if method == "fill":
            return self._fill(*args)
        if method == "meet":
            host, port = args
            self._ranks.meet(self._ranks.enter(host, port), self._host)
        elif method == "end":
            self._ended = True
            self._ranks.close()
        elif method == "step":
            self._step(*args)
        else:
            getattr(self._engine, method)(*args)
        if method == "finish_update":
            self._say(_Words("done"))
        return True

    def _step(self, *leaders: int) -> None:
        own = state_of(self._engine)
        assert own == leaders, f"this rank (unfinished, free, version) is {own}, the first one {leaders}"
        # The first rank tells of samples that failed; they are the same ones here.
        with suppress(SamplesFailed):
            self._engine.step()

    def _say(self, words: _Words) -> None:
        if self._leader is not None:
            with suppress(OSError):
                self._leader.send_bytes(told.pack(words.kind, words.text))


def state_of(engine: RolloutEngine) -> tuple[int, int, int]:
    """What must be the same on every rank before a step: samples unfinished, places free, policy version."""
    return engine.num_unfinished, engine.num_free, engine.policy_version


def _gone(rank: int) -> RankLost:
    return RankLost(f"rank {rank} of the rollout engine is gone: all of its ranks must be started again")


def _hear(other: Connection, timeout_s: float) -> _Words | None:
    """What another rank says; None: nothing."""
    try:
        if not other.poll(timeout_s):
            return None
        kind, (said,) = told.unpack(other.recv_bytes(told.MAX_BYTES), _WORDS)
        return _Words(kind, said)
    except (EOFError, OSError, ValueError):
        return _Words("gone")
