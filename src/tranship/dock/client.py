"""What a stage holds of the dock: put, take, and what it says about a lease. Payload goes past the dock's process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tranship.dock.batch import Batch
from tranship.dock.block import Ragged, pack
from tranship.dock.errors import LeaseLost, StaleLease, StaleSlab
from tranship.dock.group import OWN
from tranship.dock.link import DockLink, DockProxy
from tranship.dock.messages import Admission, Answer, BlockRef, Kind, Load, Publish, Status
from tranship.dock.nodes import NodesReader
from tranship.dock.reader import BlockReader, LocalReader
from tranship.dock.routes import Routes
from tranship.dock.rows import Rows
from tranship.dock.writer import BlockWriter
from tranship.types import SampleId


class DockClient:
    """One process's side of the dock; not thread-safe.

    call(method, *args, **kwargs): runs a method of a Dock, here or elsewhere, and returns or raises what it does.
    owner: this client's name, its own in the run: leases and slabs are counted on it. wait_s: how long a put waits for
    room, with can_park (without it a put does not: nobody else could make room meanwhile). seen_seq(stage): a `seq`
    that is known here without a message, of whoever serves the stage; by default the dock is asked. can_park: `call`
    also takes `wait_s`, and the dock then answers when it has something to give (see DockService). reader: of the
    payload, which may lie on other nodes (None: it is on this one).
    """

    def __init__(
        self,
        call: Callable[..., Any],
        owner: str,
        *,
        wait_s: float,
        seen_seq: Callable[[str], int] | None = None,
        can_park: bool = False,
        reader: NodesReader | None = None,
    ) -> None:
        self._call = call
        self._owner = owner
        self._seen_seq = seen_seq
        self._can_park = can_park
        self._nodes = reader
        self._reader: BlockReader = LocalReader(call) if reader is None else reader
        self._wait_s = wait_s if can_park else 0.0
        self._writer = self._make_writer()
        self._kept_at: dict[str, int] = {}
        self._empty: dict[str, dict[tuple[Kind, ...], tuple[int | None, Answer]]] = {}

    @classmethod
    def connect(
        cls,
        address: str,
        secret: bytes,
        owner: str,
        *,
        wait_s: float,
        node: str | None = None,
        reconnect_s: float = 0.0,
        controllers: Mapping[str, str] | None = None,
    ) -> DockClient:
        """A client of a dock that a DockService hosts; the payload is mapped if it is on this node, else fetched.

        node: where this client is (None: here, see frames.node_of). reconnect_s: see DockLink. controllers: the
        addresses of the StageControllers of stages that have one. Raises ConnectionLost, and UserError if the payload
        is on another node whose dock serves none.
        """
        link = DockLink(address, secret, owner, reconnect_s=reconnect_s)
        routes = Routes(link.call, controllers, secret, owner) if controllers else None
        return cls.over(link, secret, owner, wait_s=wait_s, node=node, routes=routes)

    @classmethod
    def over(
        cls,
        link: DockLink | DockProxy,
        secret: bytes,
        owner: str,
        *,
        wait_s: float,
        node: str | None = None,
        routes: Routes | None = None,
        seen_seq: Callable[[str], int] | None = None,
    ) -> DockClient:
        """As `connect`, over a connection that is there already. routes: to the stages that have controllers."""
        reader = NodesReader(link, secret, node)
        call = link.call
        if routes is not None:
            call, seen_seq = routes.call, routes.seen_seq
        return cls(call, owner, wait_s=wait_s, can_park=True, reader=reader, seen_seq=seen_seq)

    # Rows go in

    def admit(
        self, groups: Sequence[tuple[int, int, Kind, Mapping[str, Any]]], expected_tokens: Sequence[int] | None = None
    ) -> None:
        """New groups, each (group_id, size, kind, own columns). All have the same columns, and go in one message.

        expected_tokens: of each group, how long a response is predicted to be, for the policy dispatch (None: alike).
        """
        if not groups:
            return
        names = tuple(groups[0][3])
        for group_id, _, _, columns in groups:
            if tuple(columns) != names:
                raise ValueError(
                    f"group {group_id} has the columns {list(columns)}, and the first one has {list(names)}"
                )
        lengths = [1] * len(groups) if expected_tokens is None else expected_tokens
        rows = [SampleId(group_id, OWN) for group_id, _, _, _ in groups]
        columns = {name: [group[3][name] for group in groups] for name in names}
        self._put(
            rows,
            columns,
            lambda ref: (
                "admit",
                [
                    Admission(group_id, size, kind, ref, names, expected_tokens=expected)
                    for (group_id, size, kind, _), expected in zip(groups, lengths, strict=True)
                ],
            ),
        )

    def put(
        self,
        rows: Sequence[SampleId],
        columns: Mapping[str, Sequence[Any] | Ragged],
        lease: int | None = None,
        sampled_version: int | None = None,
        tokens: Sequence[int] | None = None,
    ) -> None:
        """Columns of rows, one value per row (see block.pack), copied once into shared memory; one message.

        lease: under which the rows were taken. sampled_version: the oldest policy version of any token, from a stage
        that samples. tokens: how many tokens each row has, for the policy balanced of whoever takes the group later.
        Raises StaleLease (the work is nobody's: forget it), ValueError for values that cannot be carried, DockFull.
        """
        if not rows:
            return
        named, names, counts = Rows.of(rows), tuple(columns), None if tokens is None else tuple(tokens)
        self._put(
            named,
            columns,
            lambda ref: ("publish", Publish(self._owner, ref, named, names, lease, sampled_version, counts)),
        )

    # Rows come out

    def take(
        self,
        stage: str,
        *,
        max_groups: int,
        version: int | None = None,
        kinds: Sequence[Kind] = ("train",),
        load: Load | None = None,
        done: Sequence[int] = (),
        wait_s: float = 0.0,
    ) -> Batch | None:
        """Up to max_groups whole groups (see Dock.take); None if there are none now, or within wait_s.

        done: leases that this message acknowledges first. wait_s: only where the dock can park a message (can_park).
        """
        asked: dict[str, Any] = {"max_groups": max_groups, "version": version, "kinds": tuple(kinds)}
        if load is not None:
            asked["load"] = load
        return self._ask("take", stage, tuple(kinds), version, asked, done, wait_s)

    def take_rows(
        self,
        stage: str,
        *,
        max_rows: int,
        kinds: Sequence[Kind] = ("train", "val"),
        done: Sequence[int] = (),
        wait_s: float = 0.0,
    ) -> Batch | None:
        """Up to max_rows rows (see Dock.take_rows); None if there are none now, or within wait_s. done: as in take."""
        asked = {"max_rows": max_rows, "kinds": tuple(kinds)}
        return self._ask("take_rows", stage, tuple(kinds), None, asked, done, wait_s)

    def take_batch(self, stage: str, *, groups: int, wait_s: float = 0.0) -> Batch | None:
        """The batch of the dock's version (see Dock.take_batch); None if it is not complete now, or within wait_s."""
        return self._ask("take_batch", stage, ("train",), None, {"groups": groups}, (), wait_s)

    def changed_since_last_take(
        self, stage: str, version: int | None = None, kinds: Sequence[Kind] | None = None
    ) -> bool:
        """Whether a take at this stage may give something that the last one did not; True if the last one did.

        version, kinds: those of the take that would follow, if they are given. A sampler that was held back because of
        its version is told True until it says that its version is still the same.
        """
        empty = self._empty.get(stage)
        if not empty or (kinds is not None and tuple(kinds) not in empty):
            return True
        asked = empty.values() if kinds is None else [empty[tuple(kinds)]]
        for asked_version, answer in asked:
            if version != asked_version and (version is not None or answer.refused):
                return True
        return self._seq(stage) > min(answer.seq for _, answer in asked)

    # What a reader says about a lease

    def ack(self, lease: int, group_ids: Sequence[int] | None = None) -> None:
        """Done with the rows of a lease, or with those of some groups. StaleLease if it is gone."""
        self._call("ack", lease, group_ids)

    def release(self, lease: int) -> None:
        """The rows go back untouched. StaleLease if the lease is gone."""
        self._call("release", lease)

    def renew(self, lease: int) -> tuple[int, ...]:
        """Still at work; returns ids of groups that were taken away. StaleLease if nothing of the lease is left."""
        return self._call("renew", lease)

    def better_elsewhere(self, stage: str, group_ids: Sequence[int], load: Load) -> list[int]:
        """Of groups that were taken and not begun, those to `release`, since others with nothing to do would be done
        earlier; the dock is asked only if it has changed since it said none."""
        seq = self._seq(stage)
        if seq == self._kept_at.get(stage):
            return []
        found = self._call("better_elsewhere", stage, self._owner, list(group_ids), load)
        if not found:
            self._kept_at[stage] = seq
        return found

    def check(self, leases: Sequence[int]) -> None:
        """StaleLease unless all of these leases hold in full: the fence immediately before an optimizer step."""
        self._call("check", list(leases))

    def started(self, lease: int, group_id: int, version: int) -> None:
        """A taken group's oldest token will be of this version. ValueError if the bound does not allow it."""
        self._call("started", lease, group_id, version)

    def drop(self, group_ids: Sequence[int], reason: str, lease: int | None) -> None:
        """Groups leave for a reason; the lease ends when nothing of it is left. StaleLease if they are not covered."""
        self._call("drop", list(group_ids), reason, lease)

    def trained(self, lease: int) -> list[int]:
        """A batch has been trained on; returns the ids of its groups. StaleLease at a second call."""
        return self._call("trained", lease)

    def finish_val(self, group_ids: Sequence[int]) -> None:
        """Validation groups leave."""
        self._call("finish_val", list(group_ids))

    # The coordinator's

    def status(self) -> Status:
        """A few numbers about the dock, in one message."""
        return self._call("status")

    @property
    def version(self) -> int:
        """The policy version that the next batch trains."""
        return self.status().version

    def num_admissible(self) -> int:
        """How many training groups may be admitted now."""
        return self._call("num_admissible")

    def advance(self, version: int) -> None:
        """The next version begins."""
        self._call("advance", version)

    def retire(self, reader: str) -> None:
        """A reader is gone: what it had goes back."""
        self._call("retire", reader)

    def ledger_counts(self) -> dict[str, Any]:
        """The ledger in numbers (see Dock.ledger_counts)."""
        return self._call("ledger_counts")

    def snapshot(self) -> dict[str, Any]:
        """What a later dock needs to go on."""
        return self._call("snapshot")

    def restore(self, snapshot: dict[str, Any]) -> list[int]:
        """Go on from a snapshot; returns the ids of the groups to admit again."""
        return self._call("restore", snapshot)

    def close(self) -> None:
        """Forget the mappings of this process; the dock stays."""
        self._reader.close()
        self._writer.forget()

    # Inside

    def _make_writer(self) -> BlockWriter:
        options: dict[str, Any] = {"wait_s": self._wait_s}
        if self._nodes is not None:
            options["node"] = self._nodes.own
            options["send"] = self._nodes.write if self._nodes.is_distant else None
        return BlockWriter(self._call, self._owner, **options)

    def _let_go(self, lease: int) -> None:
        """Payload of a lease cannot be had: its rows go back."""
        try:
            self._call("release", lease)
        except StaleLease:
            return

    def _seq(self, stage: str) -> int:
        return self._call("status").seq if self._seen_seq is None else self._seen_seq(stage)

    def _ask(
        self,
        method: str,
        stage: str,
        kinds: tuple[Kind, ...],
        version: int | None,
        arguments: dict[str, Any],
        done: Sequence[int],
        wait_s: float,
    ) -> Batch | None:
        assert self._can_park or not wait_s, "only a dock service lets a take wait"
        if done:
            arguments["done"] = list(done)
        if wait_s:
            arguments["wait_s"] = wait_s
        answer: Answer = self._call("ask", method, stage, self._owner, **arguments)
        if answer.take is None:
            self._empty.setdefault(stage, {})[kinds] = (version, answer)
            return None
        self._empty.pop(stage, None)
        return Batch(answer.take, self._reader, self._let_go)

    def _put(
        self,
        rows: Sequence[SampleId],
        columns: Mapping[str, Sequence[Any] | Ragged],
        message: Callable[[BlockRef], tuple[str, Any]],
    ) -> None:
        """Write a block and tell the dock; once more in a new slab if this one was taken away meanwhile."""
        block = pack(rows, columns)
        for attempt in (1, 2):
            try:
                ref = self._writer.write(block)
                method, argument = message(ref)
                try:
                    self._call(method, argument)
                except (StaleLease, ValueError) as error:
                    if not isinstance(error, LeaseLost):
                        self._writer.take_back(ref)
                    raise
            except StaleSlab:
                self._writer.forget()
                if attempt == 2:
                    raise
                if self._nodes is not None:
                    self._nodes.look_again()
                    self._writer = self._make_writer()
            else:
                return
