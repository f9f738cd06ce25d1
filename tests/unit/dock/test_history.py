"""Any history of messages: nothing is lost, nothing counts twice, nothing is too old, and the run can always go on."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tranship.dock import Batch, Dock, DockClient, StageNeeds, StaleLease, durable
from tranship.dock.durable import DurableDock
from tranship.dock.journal import Journal
from tranship.dock.messages import Load
from tranship.dock.routes import Routes
from tranship.dock.service import DockService
from tranship.dock.stage_dock import StageDock, stage_number
from tranship.dock.wire import bind, decode_reply, decode_request, encode_request
from tranship.types import SampleId

LEASE_S = 10.0
STAGES = (
    StageNeeds("rollout", ("prompt",)),
    StageNeeds("score", ("response",), "row"),
    StageNeeds("judge", ("prompt", "response", "reward")),
    StageNeeds("train", ("prompt", "response", "reward", "advantage")),
)
POLICIES = ("first_come", "oldest_first", "balanced", "ordered", "dispatch")
SPREAD = ("score", "judge")
# How often each thing happens in a history; its numbers say how much of it.
WEIGHTS = {
    "admit": 4,
    "generate": 6,
    "start": 3,
    "put_responses": 4,
    "score_and_judge": 4,
    "take_rows": 2,
    "put_rewards": 2,
    "take_to_judge": 2,
    "judge": 2,
    "take_batch": 2,
    "train": 3,
    "give_up": 1,
    "pass_time": 1,
    "come_back_late": 2,
}


@dataclass(frozen=True)
class Setup:
    batch: int
    staleness: int
    size: int
    ordered: bool
    on_stale: str
    refill: bool = False
    policy: str = "first_come"

    @property
    def stages(self) -> tuple[StageNeeds, ...]:
        """The stages with this policy where they can have it: batches have none, and rows are not shared out."""
        fits = [
            stage.name != "train" and (stage.unit == "group" or self.policy not in ("balanced", "dispatch"))
            for stage in STAGES
        ]
        return tuple(
            replace(stage, policy=self.policy) if fit else stage for stage, fit in zip(STAGES, fits, strict=True)
        )


def content(sample: SampleId, column: str) -> np.ndarray:
    """What every honest worker writes: it depends on the row and the column alone."""
    seed = (sample.group_id * 31 + sample.sample_index * 7 + len(column)) % 251
    return np.full(seed % 90, seed, dtype=np.int32)


class History:
    """Readers that hold leases for as long as they like, forget some of them, and come back with old ones.

    folder: the client reaches the dock through a service at a socket there (None: by a call in this process).
    crashes: the dock is a durable one, which is killed now and then and taken over by a successor. Beside it goes one
    whose journal is never started again: each of its answers, and what its successors hold, must be the same. spread:
    the stages in the middle have controllers outside the dock, which take so many groups (or rows) at once (0: they
    have not).
    """

    def __init__(self, setup: Setup, folder: Path | None = None, *, crashes: bool = False, spread: int = 0) -> None:
        self.setup = setup
        self.now = 0.0
        self.ordered = setup.ordered or setup.staleness == 0
        self.folder = folder
        self.service: DockService | None = None
        self.durable: DurableDock | None = None
        self.tickets = 0
        if crashes:
            assert folder is not None
            self.twin_root = folder / "twin"
            self.twin_root.mkdir(exist_ok=True)
            self.durable, self.twin = self.make_durables(None, None)
            self.dock = self.durable.dock
        else:
            self.dock = self.make_dock(lambda: self.now, None)
        if crashes:
            self.client = DockClient(self.say_to_durable, "reader", wait_s=0)
        elif folder is None:
            self.client = DockClient(
                lambda method, *args, **kwargs: getattr(self.dock, method)(*args, **kwargs), "reader", wait_s=0
            )
        else:
            self.service = DockService(self.dock, [f"unix:{folder / 'dock'}"]).start()
            self.client = DockClient.connect(self.service.addresses[0], self.service.secret, "reader", wait_s=0)
        self.spread = spread
        self.controllers: dict[str, StageDock] = {}
        if spread:
            for stage in SPREAD:
                self.start_controller(stage)
            routes = Routes(self.say_home, {stage: stage for stage in SPREAD}, b"", "reader", connect=self.reach)
            self.client = DockClient(routes.call, "reader", wait_s=0)
        self.next_id = 0
        self.held: dict[str, list[Batch]] = {stage.name: [] for stage in STAGES}
        self.over: list[Batch] = []
        self.versions: dict[int, dict[SampleId, int]] = {}
        self.taken_at: dict[int, int] = {}
        self.trained: Counter[int] = Counter()
        self.dropped: Counter[int] = Counter()
        self.dropped_in_batch = 0
        self.happened: Counter[str] = Counter()
        self.consumed = 0
        self.seq = 0

    def make_durables(self, adopt: Path | None, twin_adopts: Path | None) -> tuple[DurableDock, DurableDock]:
        own = DurableDock(self.make_dock, adopt, now=lambda: self.now)
        twin = DurableDock(lambda *args: self.make_dock(*args, self.twin_root), twin_adopts, now=lambda: self.now)
        twin._compact_at = 1 << 60
        return own, twin

    def make_dock(self, clock: Callable[[], float], adopt: Path | None, root: Path | None = None) -> Dock:
        setup = self.setup
        return Dock(
            setup.stages,
            run_id="history",
            batch_groups=setup.batch,
            staleness=setup.staleness,
            on_stale=setup.on_stale,
            lease_s=LEASE_S,
            slab_bytes=2048,
            capacity_bytes=1 << 20,
            shared=self.folder is not None,
            ordered=setup.ordered,
            refill=setup.refill,
            clock=clock,
            root=root or self.folder,
            adopt=adopt,
            prefault=2,
        )

    def say_to_durable(self, method: str, *args, **kwargs):
        """A message as it would come over a socket, said twice: the second time it is answered as the first."""
        assert self.durable is not None
        self.tickets += 1
        body = encode_request(method, bind(method, args, kwargs), 0.0, self.tickets)
        replies = [self.durable.run("reader", self.tickets, decode_request(body), body, waiting=False) for _ in (1, 2)]
        assert replies[0] == replies[1] or method in ("status", "num_admissible")
        assert (
            self.of_twin(self.twin.run("reader", self.tickets, decode_request(body), body, waiting=False)) == replies[0]
        )
        return decode_reply(method, replies[0])

    def of_twin(self, reply: bytes | None) -> bytes | None:
        """A twin's answer, in which its own folder stands."""
        assert self.folder is not None
        own, twin = (durable.dock.payload_folder() for durable in (self.durable, self.twin))
        if reply is None or twin.encode() not in reply:
            return reply
        return msgpack.packb(_replaced(msgpack.unpackb(reply), twin, own))

    def say_home(self, method: str, *args, **kwargs):
        return getattr(self.dock, method)(*args, **kwargs)

    def start_controller(self, stage: str) -> None:
        self.controllers[stage] = StageDock(
            next(needs for needs in STAGES if needs.name == stage),
            self.say_home,
            number=stage_number(stage, SPREAD),
            name=f"controller/{stage}",
            lease_s=LEASE_S,
            prefetch=self.spread,
            clock=lambda: self.now,
        )

    def reach(self, stage: str, secret: bytes, name: str):
        """What a client's connection to a controller is: it leads to its successor when there is one."""

        def call(method: str, *args, wait_s: float = 0.0, **kwargs):
            return getattr(self.controllers[stage], method)(*args, **kwargs)

        return SimpleNamespace(call=call)

    def kill_controller(self, amount: int, choice: int) -> None:
        """A controller dies with all that it had on loan, and a successor starts with nothing; or it has lost its
        connection only, and does not know it yet."""
        stage = SPREAD[choice % len(SPREAD)]
        self.dock.retire(f"controller/{stage}")
        if amount % 2:
            return
        self.start_controller(stage)
        for batch in list(self.held[stage]):
            self.done_with(batch)
        self.happened["killed"] += 1

    def stop_controllers(self, amount: int, choice: int) -> None:
        """The controllers stand still until a moment before, or after, the dock takes back what they have."""
        self.now += LEASE_S - 1.0 + choice % 4
        self.note_expired()

    def controllers_keep(self) -> None:
        for controller in self.controllers.values():
            controller.keep()

    def is_over(self, batch: Batch) -> bool:
        """Whether a batch's lease is over."""
        leases = self.controllers[batch.stage]._leases if batch.stage in self.controllers else self.dock._flow.leases
        return leases.find(batch.lease) is None

    def crash(self, amount: int, choice: int) -> None:
        """The dock's process is killed, and a successor takes over; now and then the last entry was being written."""
        assert self.durable is not None
        before = (self.dock.snapshot(), self.dock.seq, self.dock.memory_use(), dict(self.dock._flow.leases._leases))
        folders = [killed(one, bytes(range(choice * 3)) if amount % 2 else b"") for one in (self.durable, self.twin)]
        self.durable, self.twin = self.make_durables(*folders)
        self.dock = self.durable.dock
        leases = self.dock._flow.leases._leases
        after = (self.dock.snapshot(), self.dock.seq, self.dock.memory_use())
        assert after == before[:3]
        assert {i: list(one.keys) for i, one in leases.items()} == {i: list(one.keys) for i, one in before[3].items()}
        assert all(lease.deadline == self.now + LEASE_S for lease in leases.values())
        self.compare()
        self.happened["crashed"] += 1

    def compare(self) -> None:
        """What was begun with a base, and what was worked through from the first message on, are the same."""
        own, twin = self.durable, self.twin
        assert msgpack.packb(own.dock.base()) == msgpack.packb(twin.dock.base())
        # An ask that gave nothing is in no journal: a base remembers it, and it may be asked again all the same.
        known = {name: last for name, last in own._last.items() if not last[1].startswith(b"\x92\xc3\x93\xc0")}
        assert known == {
            name: (ticket, self.of_twin(reply)) for name, (ticket, reply) in twin._last.items() if name in known
        }
        assert own._acknowledged == twin._acknowledged

    def step(self, action: str, amount: int, choice: int) -> None:
        getattr(self, action)(amount, choice)
        self.check()

    def check(self) -> None:
        """What always holds."""
        ledger, setup = self.dock.ledger, self.setup
        ledger.check()
        assert ledger.admitted == self.next_id
        assert ledger.trained == sum(self.trained.values())
        assert max(self.trained.values(), default=1) == 1
        assert max(self.dropped.values(), default=1) == 1
        assert not self.trained.keys() & self.dropped.keys()
        assert sum(ledger.dropped.values()) == sum(self.dropped.values()) + ledger.too_stale
        gone = self.consumed + (sum(ledger.dropped.values()) - self.dropped_in_batch if setup.refill else 0)
        assert self.dock.num_admissible() == (setup.staleness + 1) * setup.batch - (self.next_id - gone)
        assert self.dock.status().num_unconsumed == self.next_id - gone
        assert self.dock.seq >= self.seq
        self.seq = self.dock.seq

    # What happens

    def admit(self, amount: int, choice: int) -> None:
        count = min(amount + 1, self.dock.num_admissible())
        ids = range(self.next_id, self.next_id + count)
        groups = [(i, self.setup.size, "train", {"prompt": content(SampleId(i, -1), "prompt")}) for i in ids]
        self.client.admit(groups)
        self.next_id += count

    def generate(self, amount: int, choice: int) -> None:
        """A worker that takes groups, does them, and says so."""
        version = max(0, self.dock.version - choice % 3)
        for _ in range(amount + 1):
            batch = self.client.take("rollout", max_groups=1, version=version, load=self.load(amount, choice))
            if batch is None:
                return
            self.check_content(batch)
            assert self.put(batch, batch.ids, "response", version)
            self.client.ack(batch.lease)
            self.note_versions(batch.ids, version)

    def start(self, amount: int, choice: int) -> None:
        version = max(0, self.dock.version - choice % (self.setup.staleness + 2))
        batch = self.client.take("rollout", max_groups=amount + 1, version=version, load=self.load(amount, choice))
        if batch is not None:
            self.hold(batch)
            self.taken_at[batch.lease] = version

    @staticmethod
    def load(amount: int, choice: int) -> Load | None:
        """What a sampler may say of itself."""
        return Load(100.0 * amount, 1 + choice, None if choice == 1 else 0.5 + amount) if choice else None

    def put_responses(self, amount: int, choice: int) -> None:
        batch = self.pick("rollout", choice)
        if batch is None:
            return
        rows = batch.ids[: max(1, len(batch.ids) * (amount + 1) // 8)]
        version = min(self.taken_at[batch.lease] + choice % 3, self.dock.version)
        if not self.put(batch, rows, "response", version):
            self.done_with(batch)
            return
        self.note_versions(rows, version)
        if amount % 2:
            self.finish(batch)

    def score_and_judge(self, amount: int, choice: int) -> None:
        while (batch := self.client.take_rows("score", max_rows=5)) is not None:
            self.do(batch, "reward")
        while (batch := self.client.take("judge", max_groups=5)) is not None:
            self.do(batch, "advantage")

    def do(self, batch: Batch, column: str) -> None:
        """All that is to be done with a batch. What the dock takes back, a controller hears of later."""
        self.check_content(batch)
        if self.put(batch, batch.ids, column):
            self.client.ack(batch.lease)
        else:
            assert self.spread

    def take_rows(self, amount: int, choice: int) -> None:
        self.hold(self.client.take_rows("score", max_rows=amount + 1))

    def put_rewards(self, amount: int, choice: int) -> None:
        batch = self.pick("score", choice)
        if batch is None:
            return
        if not self.put(batch, batch.ids, "reward"):
            self.done_with(batch)
        elif amount % 2:
            self.finish(batch)

    def take_to_judge(self, amount: int, choice: int) -> None:
        self.hold(self.client.take("judge", max_groups=amount + 1))

    def judge(self, amount: int, choice: int) -> None:
        batch = self.pick("judge", choice)
        if batch is None:
            return
        first = batch.groups[0].group_id if amount % 2 else None
        if first is not None:
            self.drop(batch, first, "filtered")
        rows = [sample for sample in batch.ids if sample.group_id != first]
        if rows and self.put(batch, rows, "advantage"):
            self.finish(batch)
        else:
            self.done_with(batch)

    def take_batch(self, amount: int, choice: int) -> None:
        batch = self.client.take_batch("train", groups=self.setup.batch)
        if batch is None:
            return
        assert batch.version == self.dock.version
        assert len(batch.window) == len(batch.groups) + batch.num_dropped == self.setup.batch
        if self.setup.refill:
            assert not batch.num_dropped
            if self.ordered:
                left = [i for i in range(self.next_id) if i not in self.trained and i not in self.dropped]
                assert list(batch.window) == left[: self.setup.batch]
        elif self.ordered:
            first = batch.version * self.setup.batch
            assert batch.window == tuple(range(first, first + self.setup.batch))
        for sample in batch.ids:
            age = batch.version - self.versions[sample.group_id][sample]
            assert 0 <= age <= self.setup.staleness
        self.hold(batch)

    def train(self, amount: int, choice: int) -> None:
        self.take_batch(amount, choice)
        batch = self.pick("train", 0)
        if batch is None:
            return
        self.done_with(batch)
        try:
            self.client.check([batch.lease])
        except StaleLease:
            return
        if amount == 7 and batch.groups:
            self.drop(batch, batch.groups[0].group_id, "invalid:nan")
            self.dropped_in_batch += 1
        self.trained.update(self.client.trained(batch.lease))
        self.consumed += self.setup.batch
        self.client.advance(self.dock.version + 1)
        self.happened["trained"] += 1

    def give_up(self, amount: int, choice: int) -> None:
        batch = self.pick(list(self.held)[amount % len(self.held)], choice)
        if batch is None:
            return
        self.done_with(batch)
        if choice % 2:
            self.say(lambda: self.client.release(batch.lease))

    def pass_time(self, amount: int, choice: int) -> None:
        for _ in range(1 + 2 * amount):
            self.now += 1.0
            self.controllers_keep()
        if self.spread:
            self.note_expired()
            return
        for lease in self.dock.expire() if self.durable is None else self.say_to_durable("expire"):
            self.happened["expired"] += 1
            for batches in self.held.values():
                for batch in [batch for batch in batches if batch.lease == lease.lease]:
                    self.done_with(batch)

    def note_expired(self) -> None:
        """The readers whose leases are over forget them. Controllers may have stood still for longer than a lease."""
        self.happened["stood_still"] += sum(lease.reader != "reader" for lease in self.dock.expire())
        for controller in self.controllers.values():
            controller.expire()
        for batch in [batch for batches in self.held.values() for batch in batches if self.is_over(batch)]:
            self.happened["expired"] += 1
            self.done_with(batch)

    def come_back_late(self, amount: int, choice: int) -> None:
        """With a lease that is over, nothing can be changed."""
        over = [batch for batch in self.over if self.is_over(batch)]
        if not over:
            return
        batch = over[choice % len(over)]
        before = self.dock.snapshot()
        for message in (self.client.ack, self.client.release, self.client.renew, self.client.trained):
            with pytest.raises(StaleLease):
                message(batch.lease)
        with pytest.raises(StaleLease):
            self.client.check([batch.lease])
        if batch.ids:
            assert not self.put(batch, batch.ids, "response")
            with pytest.raises(StaleLease):
                self.client.drop([batch.ids[0].group_id], "filtered", batch.lease)
        assert self.dock.snapshot() == before
        self.happened["late"] += 1

    def lose(self, amount: int, choice: int) -> None:
        """A node is gone with what some groups had on it: they begin again, unless they are being trained on."""
        flow = self.dock._flow
        for group in [group for group in flow.table.groups() if not group.in_batch][choice :: amount + 1]:
            flow.begin_again(group)
            self.versions.pop(group.group_id, None)
            self.happened["lost"] += 1
        self.dock.seq += 1

    # How readers do it

    def hold(self, batch: Batch | None) -> None:
        if batch is not None:
            self.check_content(batch)
            self.held[batch.stage].append(batch)

    def pick(self, stage: str, choice: int) -> Batch | None:
        held = self.held[stage]
        return held[choice % len(held)] if held else None

    def done_with(self, batch: Batch) -> None:
        self.held[batch.stage].remove(batch)
        self.over.append(batch)

    def say(self, message: Callable[[], object]) -> bool:
        """Whether a message was accepted; one that is refused is forgotten, as a worker does."""
        try:
            message()
        except StaleLease:
            self.happened["refused"] += 1
            return False
        return True

    def put(self, batch: Batch, rows: list[SampleId], column: str, version: int | None = None) -> bool:
        columns = {column: [content(row, column) for row in rows]}
        tokens = [len(value) for value in columns[column]] if column == "response" else None
        return self.say(lambda: self.client.put(rows, columns, batch.lease, version, tokens))

    def drop(self, batch: Batch, group_id: int, reason: str) -> None:
        if self.say(lambda: self.client.drop([group_id], reason, batch.lease)):
            self.dropped[group_id] += 1

    def finish(self, batch: Batch) -> None:
        """Says that all is done if it is; a group that was not put whole goes back."""
        whole = batch.stage != "rollout" or all(
            len(self.versions.get(group.group_id, {})) == self.setup.size for group in batch.groups
        )
        self.say(lambda: (self.client.ack if whole else self.client.release)(batch.lease))
        self.done_with(batch)

    def note_versions(self, rows: list[SampleId], version: int) -> None:
        for row in rows:
            self.versions.setdefault(row.group_id, {}).setdefault(row, version)

    def check_content(self, batch: Batch) -> None:
        stage = next(stage for stage in STAGES if stage.name == batch.stage)
        for column in stage.reads:
            for sample, value in zip(batch.ids, batch[column], strict=True):
                of = SampleId(sample.group_id, -1) if column == "prompt" else sample
                np.testing.assert_array_equal(value, content(of, column))

    def end(self) -> None:
        """If everybody finishes what they have, every group comes to an end, and nothing stays behind."""
        self.pass_time(7, 0)
        total = (self.next_id // self.setup.batch + 2) * self.setup.batch
        while self.consumed < total:
            self.admit(total - self.consumed - self.dock.status().num_unconsumed - 1, 0)
            self.generate(1000, 0)
            self.score_and_judge(0, 0)
            before = self.consumed
            self.train(0, 0)
            assert self.consumed > before, f"the run stands still at version {self.dock.version}: {self.dock.ledger}"
            self.check()
        assert self.dock.ledger.in_flight == 0
        assert all(slab.live == 0 for slab in self.dock.warehouse.home._slabs.values())
        assert len(self.dock._flow.leases) == 0
        self.close()

    def close(self) -> None:
        if self.service is not None:
            self.service.close()
        if self.durable is not None:
            self.compare()
        self.dock.close()
        assert all(not controller._loans._held for controller in self.controllers.values())
        if self.durable is not None:
            self.twin.dock.close()
            self.twin_root.rmdir()


def killed(durable: DurableDock, torn: bytes) -> Path:
    """The process of a durable dock is killed, maybe while it writes an entry; returns the folder that it leaves."""
    folder = durable.dock.warehouse.home._folder
    assert folder is not None
    os.pwrite(durable._journal._file, torn, durable._journal.nbytes)
    os.close(folder._lock)
    durable.close()
    return folder.path


def _replaced(plain, old: str, new: str):
    if isinstance(plain, str):
        return plain.replace(old, new)
    return [_replaced(one, old, new) for one in plain] if isinstance(plain, list) else plain


setups = st.builds(
    Setup,
    batch=st.integers(1, 3),
    staleness=st.integers(0, 3),
    size=st.integers(1, 3),
    ordered=st.booleans(),
    on_stale=st.sampled_from(["finish_first", "discard"]),
    refill=st.booleans(),
    policy=st.sampled_from(POLICIES),
)
steps = st.lists(
    st.tuples(st.sampled_from(sorted({*WEIGHTS, "lose"})), st.integers(0, 7), st.integers(0, 7)), max_size=60
)


@settings(max_examples=100, deadline=None)
@given(setups, steps, st.integers(1, 9))
def test_any_short_history_with_controllers_elsewhere(setup, steps, spread):
    history = History(setup, spread=spread)
    for action, amount, choice in steps:
        history.step(
            {"give_up": "kill_controller", "pass_time": "stop_controllers"}.get(action, action)
            if amount > 3
            else action,
            amount,
            choice,
        )
    history.end()


@settings(max_examples=200, deadline=None)
@given(setups, steps)
def test_any_short_history(setup, steps):
    history = History(setup)
    for action, amount, choice in steps:
        history.step(action, amount, choice)
    history.end()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("staleness", [0, 2])
def test_long_histories_of_each_policy(staleness, policy):
    happened: Counter[str] = Counter()
    for seed in range(12):
        draw = random.Random(seed)
        on_stale, refill = draw.choice(["finish_first", "discard"]), draw.random() < 0.5
        setup = Setup(draw.randint(1, 3), staleness, draw.randint(1, 3), False, on_stale, refill, policy)
        history = History(setup)
        for action in draw.choices(list(WEIGHTS), list(WEIGHTS.values()), k=250):
            history.step(action, draw.randint(0, 7), draw.randint(0, 7))
        happened += history.happened
        history.end()
    assert min(happened[what] for what in ("trained", "expired", "refused", "late")) >= 5


@pytest.mark.parametrize("refill", [False, True])
@pytest.mark.parametrize("on_stale", ["finish_first", "discard"])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_long_histories(staleness, ordered, on_stale, refill):
    happened: Counter[str] = Counter()
    for seed in range(8):
        draw = random.Random(seed)
        history = History(Setup(draw.randint(1, 3), staleness, draw.randint(1, 3), ordered, on_stale, refill))
        weights = WEIGHTS | {"lose": 1}
        for action in draw.choices(list(weights), list(weights.values()), k=250):
            history.step(action, draw.randint(0, 7), draw.randint(0, 7))
        happened += history.happened
        happened["too_stale"] += history.dock.ledger.too_stale
        history.end()
    assert min(happened[what] for what in ("trained", "expired", "refused", "late", "lost")) >= 5
    assert (happened["too_stale"] > 0) == (on_stale == "discard" and staleness > 0 and not ordered)


@pytest.mark.parametrize("refill", [False, True])
@pytest.mark.parametrize(("staleness", "on_stale"), [(0, "finish_first"), (1, "finish_first"), (2, "discard")])
def test_long_histories_with_controllers_elsewhere(staleness, on_stale, refill):
    happened: Counter[str] = Counter()
    weights = WEIGHTS | {"kill_controller": 1, "stop_controllers": 3}
    for seed in range(8):
        draw = random.Random(seed)
        setup = Setup(draw.randint(1, 3), staleness, draw.randint(1, 3), False, on_stale, refill)
        history = History(setup, spread=draw.randint(1, 9))
        for action in draw.choices(list(weights), list(weights.values()), k=250):
            history.step(action, draw.randint(0, 7), draw.randint(0, 7))
        happened += history.happened
        history.end()
    assert min(happened[what] for what in ("trained", "expired", "refused", "late", "killed", "stood_still")) >= 5


@pytest.mark.parametrize(("staleness", "on_stale", "refill"), [(0, "finish_first", True), (2, "discard", False)])
def test_a_history_goes_the_same_way_through_a_service(tmp_path, staleness, on_stale, refill):
    for seed in range(3):
        ended = []
        for folder in (None, tmp_path):
            draw = random.Random(seed)
            history = History(Setup(2, staleness, 3, False, on_stale, refill), folder)
            for action in draw.choices(list(WEIGHTS), list(WEIGHTS.values()), k=150):
                history.step(action, draw.randint(0, 7), draw.randint(0, 7))
            ended.append((history.dock.snapshot(), history.dock.seq, history.happened, history.trained))
            history.end()
        assert ended[0] == ended[1]
        assert list(tmp_path.iterdir()) == []


@pytest.fixture
def compacted(monkeypatch) -> list[int]:
    """Journals start again every few messages; how long each was then."""
    lengths: list[int] = []
    start_again = Journal.start_again

    def note(journal, *entry, **more):
        lengths.append(journal.nbytes)
        start_again(journal, *entry, **more)

    monkeypatch.setattr(durable, "_COMPACT_BYTES", 2048)
    monkeypatch.setattr(durable, "_COMPACT_GROWTH", 1)
    monkeypatch.setattr(Journal, "start_again", note)
    return lengths


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("staleness", "on_stale", "refill"),
    [(0, "finish_first", False), (1, "finish_first", True), (2, "discard", False), (2, "discard", True)],
)
def test_a_history_goes_on_when_the_dock_is_killed(tmp_path, compacted, staleness, on_stale, refill, policy):
    happened: Counter[str] = Counter()
    weights = WEIGHTS | {"crash": 2}
    for seed in range(4):
        draw = random.Random(seed)
        history = History(Setup(2, staleness, 2, False, on_stale, refill, policy), tmp_path, crashes=True)
        for action in draw.choices(list(weights), list(weights.values()), k=200):
            history.step(action, draw.randint(0, 7), draw.randint(0, 7))
        happened += history.happened
        history.end()
        assert list(tmp_path.iterdir()) == []
    assert min(happened[what] for what in ("trained", "expired", "refused", "crashed")) >= 5
    assert len(compacted) > 20


crash_steps = st.lists(
    st.tuples(st.sampled_from([*sorted(WEIGHTS), "crash"]), st.integers(0, 7), st.integers(0, 7)), max_size=60
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(setups, crash_steps)
def test_a_dock_goes_on_from_a_base_as_from_all_its_messages(tmp_path, compacted, setup, steps):
    history = History(setup, tmp_path, crashes=True)
    try:
        for action, amount, choice in steps:
            history.step(action, amount, choice)
        history.crash(0, 0)
        history.end()
    finally:
        shutil.rmtree(history.twin_root, ignore_errors=True)
