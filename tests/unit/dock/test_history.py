"""Any history of messages: nothing is lost, nothing counts twice, nothing is too old, and the run can always go on."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tranship.dock import Batch, Dock, DockClient, StageNeeds, StaleLease
from tranship.types import SampleId

LEASE_S = 10.0
STAGES = (
    StageNeeds("rollout", ("prompt",)),
    StageNeeds("score", ("response",), "row"),
    StageNeeds("judge", ("prompt", "response", "reward")),
    StageNeeds("train", ("prompt", "response", "reward", "advantage")),
)


def content(sample: SampleId, column: str) -> np.ndarray:
    """What every honest worker writes: it depends on the row and the column alone."""
    seed = (sample.group_id * 31 + sample.sample_index * 7 + len(column)) % 251
    return np.full(seed % 90, seed, dtype=np.int32)


class History(RuleBasedStateMachine):
    """Readers that hold leases for as long as they like, forget some of them, and come back with old ones."""

    @initialize(
        batch=st.integers(1, 3),
        staleness=st.integers(0, 3),
        size=st.integers(1, 3),
        ordered=st.booleans(),
        on_stale=st.sampled_from(["finish_first", "discard"]),
    )
    def begin(self, batch, staleness, size, ordered, on_stale):
        self.now = 0.0
        self.batch, self.staleness, self.size = batch, staleness, size
        self.ordered = ordered or staleness == 0
        self.dock = Dock(
            STAGES,
            run_id="history",
            batch_groups=batch,
            staleness=staleness,
            on_stale=on_stale,
            lease_s=LEASE_S,
            slab_bytes=2048,
            capacity_bytes=1 << 20,
            shared=False,
            ordered=ordered,
            clock=lambda: self.now,
        )
        self.client = DockClient(
            lambda method, *args, **kwargs: getattr(self.dock, method)(*args, **kwargs), "reader", wait_s=0
        )
        self.next_id = 0
        self.held: dict[str, list[Batch]] = {stage.name: [] for stage in STAGES}
        self.over: list[Batch] = []
        self.versions: dict[int, dict[SampleId, int]] = {}
        self.taken_at: dict[int, int] = {}
        self.trained: Counter[int] = Counter()
        self.dropped: Counter[int] = Counter()
        self.consumed = 0
        self.seq = 0

    # What happens

    @rule(count=st.integers(1, 12))
    def admit(self, count):
        count = min(count, self.dock.num_admissible())
        ids = range(self.next_id, self.next_id + count)
        groups = [(i, self.size, "train", {"prompt": content(SampleId(i, -1), "prompt")}) for i in ids]
        self.client.admit(groups)
        self.next_id += count

    @rule(count=st.integers(1, 4), behind=st.integers(0, 4))
    def take_rollout(self, count, behind):
        version = max(0, self.dock.version - behind)
        batch = self.client.take("rollout", max_groups=count, version=version)
        if batch is not None:
            self.hold("rollout", batch)
            self.taken_at[batch.lease] = version

    @rule(count=st.integers(1, 5))
    def take_rows(self, count):
        self.hold("score", self.client.take_rows("score", max_rows=count))

    @rule(count=st.integers(1, 3))
    def take_judge(self, count):
        self.hold("judge", self.client.take("judge", max_groups=count))

    @rule()
    def take_batch(self):
        batch = self.client.take_batch("train", groups=self.batch)
        if batch is None:
            return
        assert not self.held["train"]
        assert batch.version == self.dock.version
        assert len(batch.window) == self.batch
        assert len(batch.groups) + batch.num_dropped == self.batch
        if self.ordered:
            first = batch.version * self.batch
            assert batch.window == tuple(range(first, first + self.batch))
        for sample in batch.ids:
            age = batch.version - self.versions[sample.group_id][sample]
            assert 0 <= age <= self.staleness
        self.hold("train", batch)

    def hold(self, stage, batch):
        if batch is not None:
            self.check_content(batch)
            self.held[stage].append(batch)

    def check_content(self, batch):
        stage = next(stage for stage in STAGES if stage.name == batch.stage)
        for column in stage.reads:
            for sample, value in zip(batch.ids, batch[column], strict=True):
                of = SampleId(sample.group_id, -1) if column == "prompt" else sample
                np.testing.assert_array_equal(value, content(of, column))

    def pick(self, data, stage):
        return data.draw(st.sampled_from(self.held[stage]))

    def done_with(self, batch):
        self.held[batch.stage].remove(batch)
        self.over.append(batch)

    def put(self, batch, rows, column, **options):
        """A put as a worker does it: what is refused is forgotten. Returns whether it was accepted."""
        try:
            self.client.put(rows, {column: [content(row, column) for row in rows]}, batch.lease, **options)
        except StaleLease:
            return False
        return True

    @precondition(lambda self: self.held["rollout"])
    @rule(data=st.data(), share=st.integers(1, 9), later=st.integers(0, 2), finish=st.booleans())
    def put_responses(self, data, share, later, finish):
        batch = self.pick(data, "rollout")
        rows = batch.ids[: max(1, len(batch.ids) * share // 9)]
        version = min(self.taken_at[batch.lease] + later, self.dock.version)
        if self.put(batch, rows, "response", sampled_version=version):
            for row in rows:
                self.versions.setdefault(row.group_id, {}).setdefault(row, version)
        if finish:
            self.finish(batch)

    @precondition(lambda self: self.held["score"])
    @rule(data=st.data(), finish=st.booleans())
    def put_rewards(self, data, finish):
        batch = self.pick(data, "score")
        self.put(batch, batch.ids, "reward")
        if finish:
            self.finish(batch)

    @precondition(lambda self: self.held["judge"])
    @rule(data=st.data(), drop=st.booleans())
    def judge(self, data, drop):
        batch = self.pick(data, "judge")
        if drop:
            try:
                self.client.drop([batch.groups[0].group_id], "filtered", batch.lease)
            except StaleLease:
                pass
            else:
                self.dropped[batch.groups[0].group_id] += 1
        rows = [sample for sample in batch.ids if not drop or sample.group_id != batch.groups[0].group_id]
        if rows and self.put(batch, rows, "advantage"):
            self.finish(batch)
        else:
            self.done_with(batch)

    def finish(self, batch):
        """Says that all is done if it is; a group that was not put whole goes back."""
        complete = all(
            batch.stage != "rollout" or len(self.versions.get(group.group_id, {})) == self.size
            for group in batch.groups
        )
        try:
            (self.client.ack if complete else self.client.release)(batch.lease)
        except StaleLease:
            pass
        self.done_with(batch)

    @precondition(lambda self: self.held["train"])
    @rule(drop=st.booleans(), forget=st.booleans())
    def train(self, drop, forget):
        batch = self.held["train"][0]
        self.done_with(batch)
        if forget:
            return
        try:
            self.client.check([batch.lease])
        except StaleLease:
            return
        if drop and batch.groups:
            self.client.drop([batch.groups[0].group_id], "invalid:nan", batch.lease)
            self.dropped[batch.groups[0].group_id] += 1
        self.trained.update(self.client.trained(batch.lease))
        self.consumed += self.batch
        self.client.advance(self.dock.version + 1)

    @rule(data=st.data(), stage=st.sampled_from([stage.name for stage in STAGES]), silently=st.booleans())
    def give_up(self, data, stage, silently):
        if not self.held[stage]:
            return
        batch = self.pick(data, stage)
        self.done_with(batch)
        if not silently:
            try:
                self.client.release(batch.lease)
            except StaleLease:
                pass

    @rule(seconds=st.sampled_from([1.0, 4.0, LEASE_S + 1]))
    def time_passes(self, seconds):
        self.now += seconds
        if seconds > LEASE_S:
            self.dock.expire()
            for batches in self.held.values():
                self.over += batches
                batches.clear()

    @precondition(lambda self: self.over)
    @rule(data=st.data())
    def come_back_late(self, data):
        """With a lease that was ended or has expired, nothing can be changed; with one that was forgotten it can."""
        batch = data.draw(st.sampled_from(self.over))
        if self.dock._flow.leases.find(batch.lease) is not None:
            return
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

    # What always holds

    @invariant()
    def the_ledger_balances(self):
        if not hasattr(self, "dock"):
            return
        ledger = self.dock.ledger
        ledger.check()
        assert ledger.admitted == self.next_id
        assert ledger.trained == sum(self.trained.values())
        assert max(self.trained.values(), default=1) == 1
        assert max(self.dropped.values(), default=1) == 1
        assert not self.trained.keys() & self.dropped.keys()
        assert sum(ledger.dropped.values()) == sum(self.dropped.values()) + ledger.too_stale
        assert self.dock.num_admissible() == (self.staleness + 1) * self.batch - (self.next_id - self.consumed)

    @invariant()
    def seq_never_goes_back(self):
        if hasattr(self, "dock"):
            assert self.dock.seq >= self.seq
            self.seq = self.dock.seq

    def teardown(self):
        """If everybody finishes what they have, every group comes to an end."""
        if not hasattr(self, "dock"):
            return
        self.time_passes(seconds=LEASE_S + 1)
        total = -(-self.next_id // self.batch) * self.batch + self.batch
        while self.consumed < total:
            self.client.admit(
                [
                    (i, self.size, "train", {"prompt": content(SampleId(i, -1), "prompt")})
                    for i in range(self.next_id, min(total, self.next_id + self.dock.num_admissible()))
                ]
            )
            self.next_id = self.dock.ledger.admitted
            while (batch := self.client.take("rollout", max_groups=2, version=self.dock.version)) is not None:
                self.check_content(batch)
                self.client.put(
                    batch.ids,
                    {"response": [content(row, "response") for row in batch.ids]},
                    batch.lease,
                    self.dock.version,
                )
                for row in batch.ids:
                    self.versions.setdefault(row.group_id, {}).setdefault(row, self.dock.version)
                self.client.ack(batch.lease)
            while (batch := self.client.take_rows("score", max_rows=5)) is not None:
                self.client.put(batch.ids, {"reward": [content(row, "reward") for row in batch.ids]}, batch.lease)
                self.client.ack(batch.lease)
            while (batch := self.client.take("judge", max_groups=5)) is not None:
                self.client.put(batch.ids, {"advantage": [content(row, "advantage") for row in batch.ids]}, batch.lease)
                self.client.ack(batch.lease)
            before = self.consumed
            self.take_batch()
            assert self.held["train"], f"the run stands still: {self.dock.ledger}, version {self.dock.version}"
            self.train(drop=False, forget=False)
            assert self.consumed == before + self.batch
        assert self.dock.ledger.in_flight == 0
        assert all(slab.live == 0 for slab in self.dock._warehouse._slabs.values())
        assert len(self.dock._flow.leases) == 0
        self.dock.close()


TestHistory = History.TestCase
TestHistory.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
