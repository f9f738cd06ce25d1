"""Where a process's messages go when some stages have controllers of their own: to the dock, or to one of them.

A take goes to the controller of its stage, what is said about a lease to whoever gave it, everything else to the dock.
Where a stage's controller is not there, the stage's takes go to the dock itself until a successor is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tranship.dock.errors import LeaseLost, StaleLease
from tranship.dock.frames import ConnectionLost
from tranship.dock.link import DockLink
from tranship.dock.messages import Answer, ExpiredLease
from tranship.dock.stage_dock import number_of
from tranship.dock.wire import bind

_OF_A_LEASE = ("ack", "release", "renew", "started", "trained", "drop")
_RETRY_S = 1.0
_LOOK_S = 0.1
_PARK_S = 30.0
_EPOCH_AT = 40


@dataclass(eq=False)
class _Controller:
    """A stage's controller as this process knows it. number: of its leases, once there was one (-1: not yet).

    link: None while it is not there. again_at: when it is looked for again. switches, rejoins: how often its stage was
    served by somebody else from then on, as the caller's and as the watching thread found out. seen: the largest seq
    that the watching thread has heard of (-1: none).
    """

    stage: str
    address: str
    number: int = -1
    link: Any = None
    again_at: float = 0.0
    switches: int = 0
    rejoins: int = 0
    seen: int = -1

    @property
    def epoch(self) -> int:
        """Goes up whenever the seqs that are heard of the stage may be of another process."""
        return (self.switches + self.rejoins) << _EPOCH_AT


class Routes:
    """One process's way to the dock and to the controllers of stages; `call` is for one thread.

    home(method, ...): reaches the dock. controllers: stage -> the address of its StageController. secret: the run's.
    name: this process's, its own in the run. home_seq: a seq of the dock that is known here without a message (None:
    it is asked). connect: makes the connection to a controller.
    """

    def __init__(
        self,
        home: Callable[..., Any],
        controllers: Mapping[str, str],
        secret: bytes,
        name: str,
        *,
        home_seq: Callable[[], int] | None = None,
        connect: Callable[[str, bytes, str], Any] = DockLink,
    ) -> None:
        self._home = home
        self._home_seq = home_seq or (lambda: home("status").seq)
        self._connect = lambda address, name: connect(address, secret, name)
        self._name = name
        self._stages = {stage: _Controller(stage, address) for stage, address in controllers.items()}
        self._numbers: dict[int, _Controller] = {}
        self._wakeup: threading.Event | None = None
        self._closed = threading.Event()
        self._watching: list[Any] = []

    def call(self, method: str, *args: Any, wait_s: float = 0.0, **kwargs: Any) -> Any:
        """What a method of Dock returns or raises, wherever it runs. wait_s: as in DockLink."""
        waiting = {"wait_s": wait_s} if wait_s else {}
        if method == "ask":
            return self._ask(bind(method, args, kwargs), wait_s)
        if method == "publish":
            lease = bind(method, args, kwargs)["publish"].lease
        elif method in _OF_A_LEASE:
            lease = bind(method, args, kwargs)["lease"]
        elif method == "check":
            return self._check(bind(method, args, kwargs)["leases"])
        elif method == "retire":
            return self._retire(bind(method, args, kwargs)["reader"])
        elif method == "expire":
            return self._expire()
        else:
            lease = None
        if lease is None or not number_of(lease):
            return self._home(method, *args, **kwargs, **waiting)
        return self._say(number_of(lease), method, *args, **kwargs)

    def watch(self, wakeup: threading.Event) -> None:
        """From now on set `wakeup` whenever a controller's seq grows, and when one ends or is there again. Once."""
        assert self._wakeup is None, "these controllers are watched already"
        self._wakeup = wakeup
        for controller in self._stages.values():
            threading.Thread(
                target=self._watch, args=(controller, wakeup), name=f"watch-{controller.stage}", daemon=True
            ).start()

    def seen_seq(self, stage: str) -> int:
        """A number that has grown if a take of this stage may give more than when its last Answer said a smaller one.

        Without `watch`, by a message.
        """
        controller = self._stages.get(stage)
        if controller is None:
            return self._home_seq()
        if controller.link is not None and self._wakeup is not None:
            return controller.epoch + controller.seen
        link = self._link(controller)
        if link is not None:
            try:
                return controller.epoch + link.call("changed", -1)
            except ConnectionLost:
                self._lost(controller)
        return controller.epoch + self._home_seq()

    def close(self) -> None:
        """End the connections to the controllers; that to the dock stays."""
        self._closed.set()
        for link in [*self._watching, *(controller.link for controller in self._stages.values())]:
            if link is not None:
                link.close()

    # Takes

    def _ask(self, said: dict[str, Any], wait_s: float) -> Answer:
        said = dict(said)
        ask = [said.pop("method"), said["stage"], said.pop("reader")]
        controller = self._stages.get(said.pop("stage"))
        number = 0 if controller is None else controller.number
        own = [lease for lease in said.pop("done", ()) if number_of(lease) == number or self._ack(lease)]
        done = {"done": own} if own else {}
        if controller is None:
            return self._home("ask", *ask, **said, **done, **({"wait_s": wait_s} if wait_s else {}))
        until = time.monotonic() + wait_s
        while True:
            link, left = self._link(controller), max(0.0, until - time.monotonic())
            if link is None and own:
                raise StaleLease(f"the leases {own} are over: the controller of {controller.stage!r} is gone")
            try:
                if link is not None:
                    answer = link.call("ask", *ask, **said, **done, wait_s=left)
                    self._learn(controller, answer)
                    break
            except ConnectionLost as error:
                self._lost(controller)
                if own:
                    raise LeaseLost(f"the controller of {controller.stage!r} is gone: {error}") from error
            parked = min(left, _RETRY_S)
            answer = self._home("ask", *ask, **said, **({"wait_s": parked} if parked else {}))
            if answer.take is not None or time.monotonic() >= until:
                break
        return answer._replace(seq=controller.epoch + answer.seq)

    def _learn(self, controller: _Controller, answer: Answer) -> None:
        """From now on, what is said about leases like this one is for this controller."""
        if answer.take is not None:
            controller.number = number_of(answer.take.lease)
            self._numbers[controller.number] = controller

    def _ack(self, lease: int) -> bool:
        """Acknowledge a lease that somebody else gave than the one who is asked now; False: that is done."""
        self.call("ack", lease)
        return False

    # What is said about leases

    def _say(self, number: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """A message to the controller that gave a lease."""
        controller = self._numbers.get(number)
        link = None if controller is None else self._link(controller)
        if controller is None or link is None:
            raise StaleLease("the lease is over: the controller that gave it is not there")
        try:
            return link.call(method, *args, **kwargs)
        except ConnectionLost as error:
            self._lost(controller)
            raise LeaseLost(f"the controller of {controller.stage!r} is gone: {error}") from error

    def _check(self, leases: Iterable[int]) -> None:
        by_number: dict[int, list[int]] = {}
        for lease in leases:
            by_number.setdefault(number_of(lease), []).append(lease)
        for number, of_number in by_number.items():
            if number:
                self._say(number, "check", of_number)
            else:
                self._home("check", of_number)

    def _retire(self, reader: str) -> None:
        self._home("retire", reader)
        self._of_all("retire", reader)

    def _expire(self) -> list[ExpiredLease]:
        return [*self._home("expire"), *(lease for leases in self._of_all("expire") for lease in leases)]

    def _of_all(self, method: str, *args: Any) -> list[Any]:
        """What all controllers that are there say."""
        answers = []
        for controller in self._stages.values():
            link = self._link(controller)
            if link is None:
                continue
            try:
                answers.append(link.call(method, *args))
            except ConnectionLost:
                self._lost(controller)
        return answers

    # Connections

    def _link(self, controller: _Controller) -> Any:
        """The connection to a controller; None if it is not there, or was not a moment ago."""
        if controller.link is None and time.monotonic() >= controller.again_at:
            try:
                controller.link = self._connect(controller.address, self._name)
                controller.switches += 1
            except ConnectionLost:
                controller.again_at = time.monotonic() + _RETRY_S
        return controller.link

    def _lost(self, controller: _Controller) -> None:
        controller.link = None
        controller.switches += 1
        controller.again_at = 0.0

    def _watch(self, controller: _Controller, wakeup: threading.Event) -> None:
        """Hear of a controller's changes, and of its successors'."""
        while not self._closed.is_set():
            try:
                link = self._connect(controller.address, f"{self._name}/watch")
            except ConnectionLost:
                self._closed.wait(_LOOK_S)
                continue
            self._watching.append(link)
            if self._closed.is_set():
                link.close()
            controller.seen = -1
            controller.again_at = 0.0
            self._rejoined(controller, wakeup)
            try:
                while True:
                    seq = link.call("changed", controller.seen, wait_s=_PARK_S)
                    if seq is not None:
                        controller.seen = seq
                        wakeup.set()
            except ConnectionLost:
                self._watching.remove(link)
                self._rejoined(controller, wakeup)

    def _rejoined(self, controller: _Controller, wakeup: threading.Event) -> None:
        controller.rejoins += 1
        wakeup.set()
