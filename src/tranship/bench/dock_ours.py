"""Our side of `bench dock`: a dock in a process of its own, producers and consumers in theirs, over shared memory."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from typing import Any

from tranship.bench.dock_pipe import Process
from tranship.bench.dock_process import GROUP
from tranship.bench.dock_work import Setting, span

_LIMIT_S = 120.0
_MODULE = "tranship.bench.dock_process"


class Ours:
    """remote: the consumers are treated as on another node. One dock, and as many movers as were ever needed."""

    name = "ours"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._secret = secrets.token_hex(16)
        command = [sys.executable, "-m", _MODULE, "host", str(folder / "socket"), self._secret]
        self._host = Process(command, folder / "host.log")
        self._addresses = self._host.ask({"do": "addresses"}, _LIMIT_S)
        self._movers: dict[str, Process] = {}
        self._prepared: dict[str, tuple[Any, ...]] = {}
        self._base = 0

    def round(
        self, setting: Setting, repeats: int, *, remote: bool = False, how: str = "copy", packed: bool = False
    ) -> dict[str, Any]:
        """Seconds of putting and of getting one batch, for each repeat, and the bytes of the batch."""
        groups = setting.batch // GROUP
        producers = [self._mover(f"p{i}") for i in range(setting.producers)]
        consumers = [self._mover(f"{'r' if remote else 'c'}{i}", remote) for i in range(setting.consumers)]
        nbytes = 0
        for i, producer in enumerate(producers):
            numbers = setting.share(i)
            wanted = (numbers.start, len(numbers), setting.longest, GROUP)
            if self._prepared.get(f"p{i}", ())[:4] != wanted:
                message = dict(zip(("first", "count", "longest", "size"), wanted, strict=True))
                made = producer.ask({"do": "prepare", **message}, _LIMIT_S)
                self._prepared[f"p{i}"] = (*wanted, made["nbytes"])
            nbytes += self._prepared[f"p{i}"][4]
        puts, gets = [], []
        for _ in range(repeats):
            base = self._next(groups)
            producers[0].ask({"do": "admit", "base": base, "groups": groups, "size": GROUP}, _LIMIT_S)
            puts.append(_together(producers, {"do": "put", "base": base, "packed": packed})[0])
            each = {"do": "get", "stage": "read", "groups": groups // setting.consumers, "base": base}
            seconds, answers = _together(consumers, {**each, "size": GROUP, "longest": setting.longest, "how": how})
            gets.append(seconds)
            seen = sorted(one for answer in answers for one in answer["ids"])
            assert seen == list(range(base, base + groups)), "a group was not seen once"
            producers[0].ask({"do": "finish", "base": base, "groups": groups}, _LIMIT_S)
        return {"put_s": puts, "get_s": gets, "nbytes": nbytes}

    def wide(self, kind: str, rows: int, tokens: int, repeats: int) -> dict[str, Any]:
        """As `round`, with one producer, one consumer, and the wide columns of a kind only (see dock_wide)."""
        producer, consumer = self._mover("p0"), self._mover("c0")
        message = {"kind": kind, "count": rows, "tokens": tokens}
        made = producer.ask({"do": "prepare_wide", **message}, _LIMIT_S)
        self._prepared.pop("p0", None)
        groups, puts, gets = rows // GROUP, [], []
        for _ in range(repeats):
            base = self._next(groups)
            producer.ask({"do": "admit", "base": base, "groups": groups, "size": GROUP}, _LIMIT_S)
            puts.append(_together([producer], {"do": "put", "base": base})[0])
            how = {"base": base, "size": GROUP, "longest": tokens, "how": "copy"}
            gets.append(_together([consumer], {"do": "get", "stage": kind, "groups": groups, **how})[0])
            producer.ask({"do": "finish", "base": base, "groups": groups}, _LIMIT_S)
        return {"put_s": puts, "get_s": gets, **made}

    def copies(self, nbytes: int, repeats: int) -> list[float]:
        """Seconds of plain copies of as many bytes, in a producer."""
        return self._mover("p0").ask({"do": "copy", "nbytes": nbytes, "repeats": repeats}, _LIMIT_S)["seconds"]

    def one_by_one(self, count: int, longest: int) -> dict[str, list[float]]:
        """Seconds of each put and get of one sample."""
        message = {"do": "one_by_one", "base": self._next(count), "count": count, "longest": longest}
        return self._mover("p0").ask(message, _LIMIT_S)

    def end(self) -> None:
        """End all processes."""
        for mover in self._movers.values():
            mover.close()
        for process in (*self._movers.values(), self._host):
            process.end()

    def _next(self, groups: int) -> int:
        self._base += groups
        return self._base - groups

    def _mover(self, name: str, remote: bool = False) -> Process:
        if name not in self._movers:
            address = self._addresses["tcp" if remote else "unix"]
            words = ["mover", address, self._secret, name, "elsewhere" if remote else ""]
            self._movers[name] = Process([sys.executable, "-m", _MODULE, *words], self._folder / f"{name}.log")
        return self._movers[name]


def _together(movers: list[Process], message: dict[str, Any]) -> tuple[float, list[dict[str, Any]]]:
    """All do the same at the same time: seconds from the first start to the last end, and their answers."""
    for mover in movers:
        mover.tell(message)
    answers = [mover.hear(_LIMIT_S) for mover in movers]
    return span([(answer["times"][0], answer["times"][1]) for answer in answers]), answers
