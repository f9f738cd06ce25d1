"""A stage's controller outside the dock: what it takes and passes on, what it fences, and which messages that costs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.unit.dock.conftest import caller
from tranship.dock import Batch, DockClient, StageNeeds, StaleLease
from tranship.dock.frames import ConnectionLost
from tranship.dock.routes import Routes
from tranship.dock.stage_dock import StageDock, number_of, stage_number
from tranship.types import SampleId, UserError

LEASE_S = 10.0
STAGES = (
    StageNeeds("rollout", ("prompt",)),
    StageNeeds("score", ("prompt", "response"), "row"),
    StageNeeds("judge", ("prompt", "response")),
    StageNeeds("train", ("prompt", "response", "reward", "advantage")),
)
SPREAD = ("score", "judge")


@dataclass
class Spread:
    """A dock, the controllers of its middle stages. said: what these told the dock."""

    rig: Any
    said: Counter[str] = field(default_factory=Counter)
    stages: dict[str, StageDock] = field(default_factory=dict)

    def start(self, stage: str, prefetch: int, **more: Any) -> StageDock:
        needs = next(needs for needs in STAGES if needs.name == stage)
        self.stages[stage] = StageDock(
            needs,
            self.home,
            number=stage_number(stage, SPREAD),
            name=f"controller/{stage}",
            lease_s=LEASE_S,
            prefetch=prefetch,
            clock=self.rig.clock,
            **more,
        )
        return self.stages[stage]

    def home(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self.said[method] += 1
        return getattr(self.rig.dock, method)(*args, **kwargs)

    def client(self, name: str) -> DockClient:
        return DockClient(self.routes(name).call, name, wait_s=0)

    def routes(self, name: str) -> Routes:
        return Routes(caller(self.rig.dock), {stage: stage for stage in SPREAD}, b"", name, connect=self.connect)

    def connect(self, stage: str, secret: bytes, name: str) -> Any:
        if stage not in self.stages:
            raise ConnectionLost(f"the controller of {stage} is gone")
        return _Link(self, stage)

    def generate(self, count: int) -> list[int]:
        """Groups whose responses are there."""
        ids = self.rig.admit(count)
        while (batch := self.rig.start(count)) is not None:
            self.rig.generate(batch)
        self.said.clear()
        return ids


class _Link:
    """A connection to a controller, as long as it is that one's."""

    def __init__(self, spread: Spread, stage: str) -> None:
        self._spread, self._stage, self._dock = spread, stage, spread.stages[stage]

    def call(self, method: str, *args: Any, wait_s: float = 0.0, **kwargs: Any) -> Any:
        if self._spread.stages.get(self._stage) is not self._dock:
            raise ConnectionLost(f"the controller of {self._stage} is gone")
        return getattr(self._dock, method)(*args, **kwargs)


@pytest.fixture
def spread(make_rig):
    spread = Spread(make_rig(batch_groups=8, size=2, lease_s=LEASE_S, stages=STAGES))
    spread.start("score", 16)
    spread.start("judge", 8)
    return spread


def reward(client: DockClient, batch: Batch, rows: list[SampleId] | None = None) -> None:
    rows = batch.ids if rows is None else rows
    client.put(rows, {"reward": [{"value": float(row.group_id)} for row in rows]}, batch.lease)


def groups_of(batch: Batch | None) -> list[int]:
    assert batch is not None
    return [group.group_id for group in batch.groups]


def test_readers_are_served_from_one_take_and_the_dock_hears_of_what_is_done_once(spread):
    client = spread.client("reader")
    spread.generate(8)
    seen = []
    for _ in range(4):
        batch = client.take_rows("score", max_rows=4)
        assert number_of(batch.lease) == stage_number("score", SPREAD)
        for row, prompt in zip(batch.ids, batch["prompt"], strict=True):
            assert prompt[0] == row.group_id
        reward(client, batch)
        client.ack(batch.lease)
        seen += batch.ids
    assert len(set(seen)) == 16
    assert spread.said == {"ask": 1, "publish": 4, "ack": 1}
    assert client.take_rows("score", max_rows=4) is None
    assert len(spread.rig.dock._flow.leases) == 0


def test_rows_of_one_take_may_come_of_two_of_the_docks(spread):
    client = spread.client("reader")
    spread.start("score", 3)
    spread.generate(2)
    first = client.take_rows("score", max_rows=2)
    rest = client.take_rows("score", max_rows=2)
    assert [len(first), len(rest)] == [2, 1]
    client.release(rest.lease)
    spread.stages["score"]._fetch(("train",), 1, False)
    again = client.take_rows("score", max_rows=2)
    assert [row[:2] for row in again.ids] == [(1, 0), (1, 1)]
    assert again["response"][1].tolist() == [1000, 1001]
    spread.said.clear()
    reward(client, again)
    assert spread.said["publish"] == 2
    client.ack(again.lease)
    reward(client, first)
    client.ack(first.lease)
    judged = client.take("judge", max_groups=2)
    client.put(judged.ids, {"advantage": [1.0] * 4}, judged.lease)
    assert len(spread.rig.dock._flow.table.controllers["train"].ready("train")) == 2


def test_what_is_said_under_a_lease_that_is_over_goes_no_further(spread):
    zombie, other = spread.client("zombie"), spread.client("other")
    ids = spread.generate(2)
    batch = zombie.take("judge", max_groups=2)
    for _ in range(4):
        spread.rig.clock.now += LEASE_S / 3
        spread.stages["judge"].keep()
    again = other.take("judge", max_groups=2)
    assert groups_of(again) == ids
    spread.said.clear()
    for say in (zombie.ack, zombie.release, zombie.renew, lambda lease: zombie.check([lease])):
        with pytest.raises(StaleLease):
            say(batch.lease)
    with pytest.raises(StaleLease):
        zombie.put(batch.ids, {"advantage": [0.0] * 4}, batch.lease)
    with pytest.raises(StaleLease):
        zombie.drop([0], "filtered", batch.lease)
    assert spread.said == {}
    other.put(again.ids, {"advantage": [1.0] * 4}, again.lease)
    other.ack(again.lease)


def test_a_successors_leases_are_others(spread):
    """What a reader says under a lease of a controller that is gone does not reach the rows of somebody else."""
    reader = spread.client("reader")
    spread.generate(2)
    batch = reader.take("judge", max_groups=2)
    spread.rig.dock.retire("controller/judge")
    spread.start("judge", 8)
    other = spread.client("other")
    again = other.take("judge", max_groups=2)
    assert again.ids == batch.ids
    next_block = reader._writer._next
    with pytest.raises(StaleLease, match="gone"):
        reader.put(batch.ids, {"advantage": [0.0] * 4}, batch.lease)
    assert reader._writer._next > next_block, "nobody knows whether the dock has the block"
    with pytest.raises(StaleLease, match="is over"):
        reader.put(batch.ids, {"advantage": [0.0] * 4}, batch.lease)
    other.check([again.lease])


def test_a_dropped_group_is_taken_from_its_reader_and_the_others_stay(spread):
    reader = spread.client("reader")
    ids = spread.generate(4)
    batch = reader.take("judge", max_groups=2)
    spread.rig.client.drop([ids[0], ids[2]], "filtered", None)
    assert reader.renew(batch.lease) == (ids[0],)
    with pytest.raises(StaleLease):
        reader.check([batch.lease])
    reader.put(batch.ids, {"advantage": [1.0] * 4}, batch.lease)
    with pytest.raises(StaleLease):
        reader.drop([ids[0]], "filtered", batch.lease)
    reader.ack(batch.lease)
    spread.stages["judge"].keep()
    rest = reader.take("judge", max_groups=4)
    assert groups_of(rest) == [ids[3]]
    spread.rig.client.drop([ids[3]], "filtered", None)
    with pytest.raises(StaleLease):
        reader.put(rest.ids, {"advantage": [1.0] * 2}, rest.lease)
    with pytest.raises(StaleLease):
        reader.ack(rest.lease)
    assert len(spread.rig.dock._flow.leases) == 0
    assert spread.rig.dock.ledger.dropped == {"filtered": 3}


def test_a_reader_drops_groups_and_the_others_of_its_lease_go_on(spread):
    reader = spread.client("reader")
    ids = spread.generate(3)
    batch = reader.take("judge", max_groups=3)
    scored = reader.take_rows("score", max_rows=6)
    reader.drop([ids[1]], "invalid:empty", batch.lease)
    assert spread.rig.dock.ledger.dropped == {"invalid:empty": 1}
    assert reader.renew(batch.lease) == ()
    reader.ack(batch.lease)
    assert reader.renew(scored.lease) == (ids[1],)
    reader.ack(scored.lease)
    assert len(spread.rig.dock._flow.leases) == 0


def test_after_a_standstill_nothing_is_served_that_the_dock_has_taken_back(spread):
    reader = spread.client("reader")
    ids = spread.generate(2)
    batch = reader.take("judge", max_groups=1)
    spread.rig.clock.now += LEASE_S + 1
    assert spread.rig.dock.expire()
    direct = spread.rig.client.take("judge", max_groups=1)
    assert groups_of(direct) == [ids[0]]
    assert groups_of(reader.take("judge", max_groups=2)) == [ids[1]]
    with pytest.raises(StaleLease):
        reader.put(batch.ids, {"advantage": [0.0] * 2}, batch.lease)
    spread.rig.client.put(direct.ids, {"advantage": [1.0] * 2}, direct.lease)
    spread.rig.client.ack(direct.lease)


def test_the_docks_leases_are_renewed_by_one_message_and_told_what_is_done(spread):
    reader = spread.client("reader")
    spread.generate(4)
    batch = reader.take("judge", max_groups=2)
    scored = reader.take_rows("score", max_rows=2)
    for _ in range(9):
        spread.rig.clock.now += LEASE_S / 3
        for stage in spread.stages.values():
            stage.keep()
        reader.renew(batch.lease)
        reader.renew(scored.lease)
    assert spread.said["check"] == 18
    reader.ack(batch.lease)
    assert spread.said["ack"] == 0
    spread.stages["judge"].keep()
    assert spread.said["ack"] == 1
    assert len(spread.rig.dock._flow.leases.of_reader("controller/judge")[0].keys) == 2


def test_stages_that_the_bound_holds_back_stay_in_the_dock(spread):
    stage = spread.start("judge", 8)
    with pytest.raises(UserError, match="staleness bound"):
        stage.ask("take", "judge", "reader", max_groups=1, version=0)
    with pytest.raises(UserError, match="staleness bound"):
        stage.ask("take_batch", "judge", "reader", groups=8)
    with pytest.raises(UserError, match="staleness bound"):
        stage.started(1, 0, 0)
    with pytest.raises(UserError, match="none of those"):
        stage_number("rollout", SPREAD)


def test_messages_that_make_no_sense_change_nothing(spread):
    reader = spread.client("reader")
    stage = spread.stages["judge"]
    spread.generate(1)
    for wrong in (
        lambda: stage.ask("take_rows", "judge", "reader", max_rows=1),
        lambda: stage.ask("take", "score", "reader", max_groups=1),
        lambda: stage.ask("take", "judge", "reader", max_groups=0),
        lambda: spread.start("judge", 0),
    ):
        with pytest.raises(ValueError):
            wrong()
    batch = reader.take("judge", max_groups=1)
    with pytest.raises(ValueError, match="not a batch"):
        reader.trained(batch.lease)
    with pytest.raises(ValueError, match="no row"):
        reader.put([batch.ids[0]._replace(sample_index=7)], {"advantage": [0.0]}, batch.lease)
    with pytest.raises(StaleLease, match="does not cover"):
        reader.put([batch.ids[0]._replace(group_id=99)], {"advantage": [0.0]}, batch.lease)
    with pytest.raises(StaleLease, match="does not cover"):
        reader.drop([99], "filtered", batch.lease)
    assert spread.rig.dock.ledger.dropped == {}


def test_rows_are_awaited_at_the_dock_once_and_fetched_ahead_where_it_has_more(spread):
    wanted: list[tuple[str, int]] = []
    stage = spread.start("judge", 4, await_rows=lambda kind, count: wanted.append((kind, count)))
    ask = {"method": "take", "stage": "judge", "reader": "reader", "kinds": ("train",), "max_groups": 2}
    assert stage.ask(**ask, waiting=True).take is None
    assert stage.ask(**ask, waiting=True).take is None
    assert stage.ask(**ask).take is None
    assert wanted == [("train", 4)]
    assert spread.said == {}
    spread.generate(8)
    seq = stage.seq
    stage.receive("train", spread.rig.dock.take("judge", "controller/judge", max_groups=4), 4)
    assert stage.changed(seq) == stage.seq
    assert len(stage.ask(**ask, waiting=True).take.groups) == 2
    assert wanted == [("train", 4)]
    assert len(stage.ask(**ask, waiting=True).take.groups) == 2
    assert wanted == [("train", 4)] * 2


def test_takes_go_to_the_dock_while_a_controller_is_not_there(spread):
    routes = spread.routes("reader")
    client = DockClient(routes.call, "reader", wait_s=0, seen_seq=routes.seen_seq)
    assert client.take("judge", max_groups=1) is None
    assert not client.changed_since_last_take("judge")
    assert not client.changed_since_last_take("judge")
    gone = spread.stages.pop("judge")
    assert client.changed_since_last_take("judge")
    assert client.take("judge", max_groups=1) is None
    assert not client.changed_since_last_take("judge")
    spread.generate(2)
    assert client.changed_since_last_take("judge")
    batch = client.take("judge", max_groups=1)
    assert number_of(batch.lease) == 0
    spread.stages["judge"] = gone
    for controller in routes._stages.values():
        controller.again_at = 0.0
    other = client.take("judge", max_groups=1, done=[batch.lease])
    assert number_of(other.lease) == stage_number("judge", SPREAD)
    client.check([other.lease])
    with pytest.raises(StaleLease):
        client.check([other.lease, batch.lease])
    del spread.stages["judge"]
    with pytest.raises(StaleLease):
        client.take("judge", max_groups=1, done=[other.lease])


def test_a_retired_readers_leases_go_back_wherever_they_are(spread):
    reader, other = spread.client("reader"), spread.client("other")
    spread.generate(2)
    held = [reader.take("judge", max_groups=2), reader.take_rows("score", max_rows=4)]
    other.retire("reader")
    assert groups_of(other.take("judge", max_groups=2)) == groups_of(held[0])
    assert other.take_rows("score", max_rows=4).ids == held[1].ids
    spread.rig.clock.now += LEASE_S + 1
    assert sorted(lease.stage for lease in spread.routes("third").call("expire")) == [
        "judge",
        "judge",
        "score",
        "score",
    ]
    assert len(spread.rig.dock._flow.leases) == 0


def leases_of(spread: Spread, stage: str) -> list[int]:
    return [lease.id for lease in spread.rig.dock._flow.leases.of_reader(f"controller/{stage}")]


def test_of_a_group_under_two_of_the_docks_leases_the_rows_under_the_other_one_go_on(spread):
    reader = spread.client("reader")
    spread.start("score", 1)
    spread.generate(1)
    for batch in [reader.take_rows("score", max_rows=1) for _ in range(2)]:
        reader.release(batch.lease)
    batch = reader.take_rows("score", max_rows=2)
    assert len(batch) == 2
    lost = batch.ids[1]
    spread.rig.dock.release(leases_of(spread, "score")[lost.sample_index])
    with pytest.raises(StaleLease):
        reader.renew(batch.lease)
    rest = reader.take_rows("score", max_rows=2)
    assert rest.ids == [batch.ids[0]]
    reward(reader, rest)
    reader.ack(rest.lease)
    again = reader.take_rows("score", max_rows=2)
    assert again.ids == [lost]
    reward(reader, again)
    reader.ack(again.lease)
    assert spread.rig.dock._flow.table.get(0).is_complete("reward")
    assert len(spread.rig.dock._flow.leases) == 0


def test_rows_that_come_again_were_taken_away_from_whoever_had_them(spread):
    reader, other = spread.client("reader"), spread.client("other")
    spread.generate(1)
    batch = reader.take("judge", max_groups=1)
    spread.rig.dock.release(leases_of(spread, "judge")[0])
    again = other.take("judge", max_groups=1)
    assert again.ids == batch.ids
    spread.said.clear()
    with pytest.raises(StaleLease):
        reader.put(batch.ids, {"advantage": [0.0] * 2}, batch.lease)
    assert spread.said == {}
    other.put(again.ids, {"advantage": [1.0] * 2}, again.lease)
    other.ack(again.lease)
    spread.stages["judge"].keep()
    assert len(spread.rig.dock._flow.leases) == 0


def test_who_has_other_rows_of_a_group_that_a_reader_drops_learns_it(spread):
    reader, other = spread.client("reader"), spread.client("other")
    spread.generate(1)
    batch, rest = reader.take_rows("score", max_rows=1), other.take_rows("score", max_rows=1)
    reader.drop([0], "invalid:empty", batch.lease)
    with pytest.raises(StaleLease, match="taken away"):
        other.release(rest.lease)
    assert reader.take_rows("score", max_rows=1) is None


def test_a_drop_that_the_dock_refuses_is_refused_and_what_is_lost_is_known(spread):
    reader = spread.client("reader")
    spread.generate(2)
    batch = reader.take("judge", max_groups=2)
    spread.rig.client.drop([0], "filtered", None)
    with pytest.raises(StaleLease):
        reader.drop([0], "filtered", batch.lease)
    assert spread.stages["judge"]._lease(batch.lease).revoked == [0]
    assert spread.rig.dock.ledger.dropped == {"filtered": 1}
    spread.said.clear()
    for _ in range(3):
        spread.stages["judge"].keep()
    assert spread.said == {"renew": 3}
    reader.ack(batch.lease)
