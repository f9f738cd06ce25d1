"""`tranship bench dock`: the sample flow, ours beside TransferQueue, a central Ray actor, Ray objects and memcpy.

Every side keeps its processes for the whole benchmark; the sides alternate. One round of a side puts a batch from all
producers at once, then gets it with all consumers at once; a round trip is the sum of the two times, each from the
first start to the last end. What arrives is compared bit for bit before anything is timed. Of ours the
acknowledgement is timed too; of the others only putting and getting. What admits rows here, and what clears them
there, is not.

Each is given rows in the form that its peer is given: Ray's sides a list of arrays per column, and so are we beside
them; TransferQueue a nested tensor per column, whose values lie one behind the other before the clock starts, and so do
ours beside it (`vs_transferqueue_lists_*` is the ratio with our lists).
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from tranship.bench.dock_control import samples_per_s, take_seconds
from tranship.bench.dock_ours import Ours
from tranship.bench.dock_pipe import Process
from tranship.bench.dock_storm import LEASE_S, Storm
from tranship.bench.dock_wide import KINDS
from tranship.bench.dock_work import Setting
from tranship.bench.report import Bar, Report
from tranship.dock.take_policy import FIRST_COME, POLICIES
from tranship.models.cache import cache_root
from tranship.types import RunError, UserError

SIDES = ("ours", "transferqueue", "central", "objects")
WORKLOADS = ("1x1", "small", "4x4", "8x8", "one", "wide", "control", "storm")
QUICK = ("1x1", "one", "wide", "control", "storm")
_SETTINGS = {
    "1x1": Setting(1, 1, 1024, 4096),
    "small": Setting(1, 1, 256, 2048),
    "4x4": Setting(4, 4, 1024, 4096),
    "8x8": Setting(8, 8, 1024, 2048),
}
_WIDE = {"rows": 64, "tokens": 1024}
_ONE_SAMPLES, _ONE_LONGEST = 200, 4096
_LIMIT_S = 180.0
_REPEATS = {"ours": 3, "transferqueue": 1, "central": 2, "objects": 2}

BARS = {
    "vs_transferqueue_1x1": Bar("at least", 25.0),
    "vs_transferqueue_4x4": Bar("at least", 15.0),
    "vs_transferqueue_8x8": Bar("at least", 15.0),
    "vs_central_actor_1x1": Bar("at least", 8.0),
    "vs_central_actor_4x4": Bar("at least", 3.5),
    "vs_central_actor_8x8": Bar("at least", 3.5),
    "vs_ray_objects_1x1": Bar("at least", 3.0),
    "remote_vs_transferqueue": Bar("at least", 8.0),
    "remote_vs_central_4x4": Bar("at least", 2.5),
    "put_vs_memcpy": Bar("at least", 0.45),
    "get_vs_memcpy": Bar("at least", 0.5),
    "view_vs_memcpy": Bar("at least", 1.0),
    "one_sample_put_ms": Bar("at most", 0.15),
    "one_sample_get_ms": Bar("at most", 0.25),
    "controller_samples_per_s": Bar("at least", 1e6),
    "take_cost_64k_vs_1k_rows": Bar("at most", 1.2),
    "rows_lost": Bar("at most", 0.0),
    "rows_counted_twice": Bar("at most", 0.0),
    "recovery_s": Bar("at most", LEASE_S + 1.0),
}
# Figure -> (workload, the other side, ours: from lists, packed, or from lists with readers as on another node).
_RATIOS = {
    "vs_transferqueue_1x1": ("1x1", "transferqueue", "ours_packed"),
    "vs_transferqueue_lists_1x1": ("1x1", "transferqueue", "ours"),
    "vs_central_actor_1x1": ("1x1", "central", "ours"),
    "vs_ray_objects_1x1": ("1x1", "objects", "ours"),
    "remote_vs_transferqueue": ("1x1", "transferqueue", "remote"),
    "vs_transferqueue_small": ("small", "transferqueue", "ours_packed"),
    "vs_transferqueue_lists_small": ("small", "transferqueue", "ours"),
    "vs_central_actor_small": ("small", "central", "ours"),
    "vs_ray_objects_small": ("small", "objects", "ours"),
    "vs_transferqueue_4x4": ("4x4", "transferqueue", "ours_packed"),
    "vs_transferqueue_lists_4x4": ("4x4", "transferqueue", "ours"),
    "vs_central_actor_4x4": ("4x4", "central", "ours"),
    "remote_vs_central_4x4": ("4x4", "central", "remote"),
    "remote_vs_transferqueue_4x4": ("4x4", "transferqueue", "remote"),
    "vs_transferqueue_8x8": ("8x8", "transferqueue", "ours_packed"),
    "vs_transferqueue_lists_8x8": ("8x8", "transferqueue", "ours"),
    "vs_central_actor_8x8": ("8x8", "central", "ours"),
}
_NEEDS_REMOTE = {workload for workload, _, mine in _RATIOS.values() if mine == "remote"}


def main(quick: bool, json_file: Path | None, workloads: str = "", sides: str = "", rounds: int | None = None) -> int:
    """Run the benchmark, print its table, write json_file; returns 0.

    workloads: some of WORKLOADS (empty: all; QUICK with quick, so that it ends in a minute). sides: some of SIDES
    (empty: all). rounds: counted rounds of each setting (None: 5, or 2 with quick).
    """
    names = _chosen(workloads or (",".join(QUICK) if quick else ""), WORKLOADS, "workloads")
    chosen = _chosen(sides, SIDES, "sides")
    if "ours" not in chosen:
        raise UserError("bench dock: sides must have ours, which everything is compared with")
    num_rounds = rounds or (2 if quick else 5)
    terminal = Console()
    report = Report("bench dock (ratios are round trips per second, ours over the other)", BARS)
    with tempfile.TemporaryDirectory(prefix="tranship-bench-") as text:
        folder = Path(text)
        settings = [name for name in names if name in _SETTINGS]
        ours, peers = Ours(folder), _Peers(chosen if settings else [], folder, report)
        try:
            for name in settings:
                _compare(name, ours, peers, num_rounds, report, terminal)
            if "one" in names:
                _add_one_sample(ours, num_rounds, report)
            if "wide" in names:
                _add_wide(ours, num_rounds, report)
        finally:
            ours.end()
            peers.end()
        if "control" in names:
            _add_control(report)
        if "storm" in names:
            _add_storm(folder, 4.0 if quick else 20.0, report)
    _add_missing(names, report)
    report.print(terminal)
    if json_file is not None:
        report.write(json_file)
    return 0


class _Peers:
    """The other sides, each in processes of its own; one that is not there, or fails, is left out with a note."""

    def __init__(self, sides: list[str], folder: Path, report: Report) -> None:
        self._report = report
        self.there: dict[str, Process] = {}
        started: list[tuple[Process, list[str]]] = []
        on_ray = [side for side in ("central", "objects") if side in sides]
        if on_ray:
            started.append((Process([sys.executable, "-m", "tranship.bench.dock_ray"], folder / "ray.log"), on_ray))
        python = peer_python()
        if "transferqueue" in sides and python.exists():
            script = Path(__file__).with_name("dock_transferqueue_peer.py")
            peer = Process([str(python), str(script)], folder / "transferqueue.log")
            started.append((peer, ["transferqueue"]))
        elif "transferqueue" in sides:
            words = f"TransferQueue was not measured: {python} is not there (`make bench-env` makes it)"
            report.notes.append(words)
        for process, names in started:
            self._wait_for(process, names)

    def round(self, side: str, setting: Setting, repeats: int, *, checked: bool) -> dict[str, Any] | None:
        """A round of a side; None if it is not there (any more)."""
        if side not in self.there:
            return None
        message = {"do": "round", **asdict(setting), "repeats": repeats, "checked": checked}
        try:
            return self.there[side].ask(message | ({} if side == "transferqueue" else {"side": side}), _LIMIT_S)
        except RunError as error:
            self._leave_out(side, error)
            return None

    def end(self) -> None:
        """End all of them."""
        processes = list(dict.fromkeys(self.there.values()))
        for process in processes:
            process.close()
        for process in processes:
            process.end()

    def _wait_for(self, process: Process, sides: list[str]) -> None:
        try:
            said = process.ask({"do": "versions"}, _LIMIT_S)
        except RunError as error:
            self._leave_out(" and ".join(sides), error)
            return
        self._report.peers |= {name: version for name, version in said.items() if name != "python"}
        self.there |= dict.fromkeys(sides, process)

    def _leave_out(self, side: str, error: RunError) -> None:
        self._report.notes.append(f"{side} was not measured (any more): {error}")
        self.there.pop(side, None)


def peer_python() -> Path:
    """The interpreter of TransferQueue's own environment, whether it is there or not."""
    return cache_root() / "peers" / "transferqueue" / "bin" / "python"


def _compare(name: str, ours: Ours, peers: _Peers, rounds: int, report: Report, terminal: Console) -> None:
    """The figures of one setting."""
    setting = _SETTINGS[name]
    others = [side for side in peers.there if side != "objects" or setting.producers == setting.consumers == 1]
    is_remote = name in _NEEDS_REMOTE
    for is_packed in (False, True):
        ours.round(setting, 1, how="check", packed=is_packed)
    if is_remote:
        ours.round(setting, 1, remote=True, how="check")
    for side in list(others):
        peers.round(side, setting, 1, checked=True)
    trips: dict[str, list[float]] = {}
    nbytes = 0
    local: dict[str, list[float]] = {key: [] for key in ("put", "put_packed", "get", "view", "copy")}
    for _ in range(rounds):
        mine = ours.round(setting, _REPEATS["ours"])
        nbytes = mine["nbytes"]
        packed = ours.round(setting, _REPEATS["ours"], packed=True)
        trips.setdefault("ours", []).append(_trip(mine))
        trips.setdefault("ours_packed", []).append(_trip(packed))
        if is_remote:
            trips.setdefault("remote", []).append(_trip(ours.round(setting, _REPEATS["ours"], remote=True)))
        if name == "1x1":
            copies = ours.copies(mine["nbytes"], _REPEATS["ours"])
            views = ours.round(setting, _REPEATS["ours"], how="view")["get_s"]
            found = {"put": mine["put_s"], "put_packed": packed["put_s"], "get": mine["get_s"]}
            for key, seconds in (found | {"view": views, "copy": copies}).items():
                local[key].append(statistics.median(seconds))
        for side in others:
            done = peers.round(side, setting, _REPEATS[side], checked=False)
            if done is not None:
                trips.setdefault(side, []).append(_trip(done))
    _print_trips(name, trips, nbytes, terminal)
    for side, seconds in trips.items():
        report.add(f"round_trip_ms_{name}_{side}", [1e3 * value for value in seconds])
    for figure, (workload, side, mine) in _RATIOS.items():
        if workload == name and len(trips.get(side, ())) == rounds:
            report.add(figure, [theirs / own for theirs, own in zip(trips[side], trips[mine], strict=True)])
    if name == "1x1":
        for key in ("put", "put_packed", "get", "view"):
            report.add(f"{key}_vs_memcpy", [c / own for c, own in zip(local["copy"], local[key], strict=True)])


def _trip(done: Mapping[str, Any]) -> float:
    """Seconds of a round trip: the median repeat's putting and getting."""
    return statistics.median(done["put_s"]) + statistics.median(done["get_s"])


def _print_trips(name: str, trips: Mapping[str, list[float]], nbytes: int, terminal: Console) -> None:
    texts = [f"{side} {1e3 * statistics.median(seconds):,.1f} ms" for side, seconds in trips.items()]
    terminal.print(f"{name}: {nbytes / 1e6:.1f} MB a round trip: {', '.join(texts)}", highlight=False)


def _add_one_sample(ours: Ours, rounds: int, report: Report) -> None:
    ours.one_by_one(20, _ONE_LONGEST)
    puts, gets = [], []
    for _ in range(rounds):
        seconds = ours.one_by_one(_ONE_SAMPLES, _ONE_LONGEST)
        puts.append(1e3 * statistics.median(seconds["put_s"]))
        gets.append(1e3 * statistics.median(seconds["get_s"]))
    report.add("one_sample_put_ms", puts)
    report.add("one_sample_get_ms", gets)


def _add_wide(ours: Ours, rounds: int, report: Report) -> None:
    """Wide columns: bytes of a sample, megabytes a second of put and get, and both over memcpy."""
    for kind in KINDS:
        ours.wide(kind, **_WIDE, repeats=2)
        found: dict[str, list[float]] = {}
        for _ in range(rounds):
            done = ours.wide(kind, **_WIDE, repeats=2)
            copy = statistics.median(ours.copies(done["nbytes"], 2))
            for what in ("put", "get"):
                seconds = statistics.median(done[f"{what}_s"])
                found.setdefault(f"{what}_mb_s", []).append(done["nbytes"] / seconds / 1e6)
                found.setdefault(f"{what}_vs_memcpy", []).append(copy / seconds)
            found.setdefault("bytes_per_sample", []).append(done["nbytes"] / _WIDE["rows"])
        for figure, values in found.items():
            report.add(f"wide_{kind}_{figure}", values)


def _add_control(report: Report) -> None:
    report.add("controller_samples_per_s", samples_per_s(20))
    pairs = [(take_seconds(1 << 16, 300), take_seconds(1 << 10, 300)) for _ in range(3)]
    report.add("take_cost_64k_vs_1k_rows", [statistics.median(many) / statistics.median(few) for many, few in pairs])
    report.add("take_us_64k_rows", [1e6 * statistics.median(many) for many, _ in pairs])
    for policy in (name for name in POLICIES if name != FIRST_COME):
        pairs = [(take_seconds(1 << 16, 300, policy), take_seconds(1 << 10, 300, policy)) for _ in range(3)]
        ratios = [statistics.median(many) / statistics.median(few) for many, few in pairs]
        report.add(f"take_cost_64k_vs_1k_rows_{policy}", ratios)
        report.add(f"take_us_64k_rows_{policy}", [1e6 * statistics.median(many) for many, _ in pairs])


def _add_storm(folder: Path, seconds: float, report: Report) -> None:
    outcome = Storm(folder, seed=0).run(seconds)
    report.add("rows_lost", [outcome.rows_lost])
    report.add("rows_counted_twice", [outcome.rows_counted_twice])
    report.add("workers_killed", [outcome.killed])
    report.add("workers_stopped", [outcome.stopped])
    if outcome.dock_recovery_s:
        report.add("dock_recovery_s", outcome.dock_recovery_s)
    report.add("groups_trained_in_the_storm", [sum(outcome.seen.values())])
    report.add("recovery_s", [Storm(folder, seed=0).recover(stop=True)])
    report.add("recovery_killed_s", [Storm(folder, seed=0).recover(stop=False)])


def _add_missing(names: list[str], report: Report) -> None:
    for name in BARS:
        if name not in report.rounds:
            ran = name not in _RATIOS or _RATIOS[name][0] in names
            report.add_missing(name, "the other side did not run" if ran and name in _RATIOS else "left out")


def _chosen(text: str, known: tuple[str, ...], what: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise UserError(f"bench dock: {what} has no {name!r}; use some of: {', '.join(known)}")
    return names or list(known)
