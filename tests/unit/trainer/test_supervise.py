"""Who is started again and how, who is not, and what a death does to those that wait for an answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tranship.dock import DockClient
from tranship.runtime import CallTimeout, ProcessDied
from tranship.trainer.placement import WorkerPlan
from tranship.trainer.supervise import Supervisor
from tranship.types import RunError, UserError

PLANS = (
    WorkerPlan("trainer", ("train", "advantage")),
    WorkerPlan("sampler-0", ("reward", "rollout")),
    WorkerPlan("sampler-1", ("reward", "rollout")),
    WorkerPlan("reward-model", ("reward_model",)),
)


class FakePending:
    """A call whose answer may be late."""

    def __init__(self, handle: FakeHandle, method: str) -> None:
        self.handle = handle
        self.method = method

    def done(self) -> bool:
        return self.handle.dead is not None or self.method not in self.handle.late

    def result(self, timeout_s: float) -> Any:
        if self.handle.dead is not None:
            raise self.handle.dead
        if self.method in self.handle.late:
            raise CallTimeout(f"{self.method} is late")
        return self.handle.answers.get(self.method)


class FakeHandle:
    """A process that notes what it is asked. late: methods that it does not answer yet."""

    def __init__(self, name: str, pid: int) -> None:
        self.name = name
        self.pid = pid
        self.calls: list[tuple[Any, ...]] = []
        self.answers: dict[str, Any] = {
            "timings": {"rollout": 1.0, "rss_bytes": 10.0},
            "pieces": f"pieces of {name}",
            "access": SimpleNamespace(name=f"the way to process {pid}", folder=None),
            "left": f"what {name} left",
            "door": f"door of {name}",
        }
        self.late: set[str] = set()
        self.dead: ProcessDied | None = None
        self.stopped = False
        self.kwargs: dict[str, Any] = {}

    def wait_ready(self, timeout_s: float) -> None:
        if self.dead is not None:
            raise self.dead

    def submit(self, method: str, *args: Any, **kwargs: Any) -> FakePending:
        self.calls.append((method, *args))
        return FakePending(self, method)

    def call(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        return self.submit(method, *args).result(timeout_s)

    def alive(self) -> bool:
        return self.dead is None

    def stop(self, timeout_s: float = 5.0) -> None:
        self.stopped = True

    def methods(self) -> list[str]:
        return [call[0] for call in self.calls]


class FakeRuntime:
    """Starts fake processes; `poll` raises what is in `news`. born_dead: names whose first process dies at once."""

    def __init__(self) -> None:
        self.started: list[FakeHandle] = []
        self.news: deque[Exception] = deque()
        self.born_dead: set[str] = set()
        self.late_when_new: set[str] = set()
        self.has_second = False
        self.has_controller = False
        self.has_ranks = False

    def start(self, name: str, factory: str, kwargs: dict[str, Any], **options: Any) -> FakeHandle:
        handle = FakeHandle(name, 100 + len(self.started))
        handle.kwargs = kwargs
        handle.late = set(self.late_when_new)
        if name in self.born_dead:
            self.born_dead.remove(name)
            handle.dead = ProcessDied(f"process {name!r} died", name)
        self.started.append(handle)
        return handle

    def nodes(self) -> list[str]:
        return ["first", *(["second"] if self.has_second else [])]

    def service_proxy(self, name: str) -> str:
        return f"proxy of {name}"

    def poll(self, timeout_s: float) -> bool:
        if self.news:
            raise self.news.popleft()
        return False

    def events(self) -> list[Any]:
        return []

    def kill(self, name: str) -> ProcessDied:
        """The newest process of a name dies."""
        handle = self.of(name)
        handle.dead = ProcessDied(f"process {name!r} (pid {handle.pid}) died", name, handle.pid)
        self.news.append(handle.dead)
        return handle.dead

    def of(self, name: str) -> FakeHandle:
        return next(handle for handle in reversed(self.started) if handle.name == name)


class FakeRecorder:
    """Keeps events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def event(self, kind: str, values: dict[str, Any], *, say: str = "") -> None:
        self.events.append((kind, values))


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime()


@pytest.fixture
def recorder() -> FakeRecorder:
    return FakeRecorder()


def client_of(dock: FakeHandle, report: Any, hear: Callable[[], None]) -> DockClient:
    """A client that asks the process itself, and hears of deaths when the process is dead."""

    def call(method: str, *args: Any, **kwargs: Any) -> Any:
        current = RUNTIME_OF[id(report)].of("dock")
        if current.dead is not None:
            hear()
        return RUNTIME_OF[id(report)].of("dock").call(method, *args, timeout_s=0, **kwargs)

    return DockClient(call, "coordinator", wait_s=0)


RUNTIME_OF: dict[int, FakeRuntime] = {}


@pytest.fixture
def supervisor(runtime: FakeRuntime, recorder: FakeRecorder, monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    """Four workers, ready, the samplers connected and at version 7. A process may be started again twice."""
    monkeypatch.setattr("tranship.trainer.supervise.dock_client", client_of)
    config = SimpleNamespace(
        placement=SimpleNamespace(runtime="ray", ray_address=None),
        run=SimpleNamespace(max_restarts=2),
        dock=SimpleNamespace(lease_s=60.0, journal=True, controllers=["reward"] if runtime.has_controller else []),
    )
    report: Any = SimpleNamespace(
        config=config, table=(), workers=PLANS, num_threads=1, device="cpu", spec=lambda plan: plan.name
    )
    if runtime.has_ranks:
        report.workers = (PLANS[0], WorkerPlan("sampler-0", ("reward", "rollout"), num_ranks=3), *PLANS[2:])
    RUNTIME_OF[id(report)] = runtime
    made = Supervisor(runtime, report, Path("run"), recorder, 0)  # type: ignore[arg-type]
    made.start()
    made.connect()
    runtime.of("trainer").answers["publish_weights"] = "version 7"
    made.publish(7)
    made.announce()
    return made


def retired(runtime: FakeRuntime) -> list[Any]:
    return [call[1] for call in runtime.of("dock").calls if call[0] == "retire"]


def test_a_dead_sampler_goes_back_and_its_successor_serves_once_it_has_the_weights(
    supervisor: Supervisor, runtime: FakeRuntime, recorder: FakeRecorder
) -> None:
    runtime.late_when_new = {"timings", "fetch_weights"}
    runtime.kill("sampler-0")
    supervisor.poll(0.1)
    assert runtime.of("sampler-0").stopped
    assert retired(runtime) == ["sampler-0"]
    successor = runtime.of("sampler-0.1")
    assert successor.methods() == ["timings"], "still being built"

    successor.late.remove("timings")
    supervisor.poll(0.1)
    assert successor.calls[1:] == [
        ("connect_weights", "pieces of trainer", ["pieces of sampler-0"]),
        ("fetch_weights", "version 7"),
    ]
    runtime.of("trainer").answers["publish_weights"] = "version 8"
    supervisor.publish(8)
    supervisor.announce()
    supervisor.fetch()
    assert successor.methods().count("announce_weights") == 0, "it does not serve yet"
    assert ("announce_weights", "version 8") in runtime.of("sampler-1").calls

    successor.late.clear()
    supervisor.poll(0.1)
    assert successor.calls[-1] == ("announce_weights", "version 8")
    assert retired(runtime) == ["sampler-0", "sampler-0"], "what it said last may have come after the first time"
    assert [kind for kind, _ in recorder.events] == ["processes", "worker_died", "worker_replaced"]
    supervisor.announce()
    assert successor.methods().count("announce_weights") == 2


def test_a_reward_model_needs_no_weights(supervisor: Supervisor, runtime: FakeRuntime) -> None:
    runtime.kill("reward-model")
    supervisor.poll(0.1)
    assert runtime.of("reward-model.1").methods() == ["timings"]
    assert retired(runtime) == ["reward-model", "reward-model"]


def test_the_death_of_the_trainer_is_for_the_run(supervisor: Supervisor, runtime: FakeRuntime) -> None:
    death = runtime.kill("trainer")
    with pytest.raises(ProcessDied) as caught:
        supervisor.poll(0.1)
    assert caught.value is death
    assert len(runtime.started) == 5


def test_a_dead_dock_gets_a_successor_that_goes_on_from_what_it_left(
    supervisor: Supervisor, runtime: FakeRuntime, recorder: FakeRecorder
) -> None:
    first = runtime.of("dock")
    assert first.kwargs["adopt"] is None
    runtime.kill("dock")
    supervisor.poll(0.1)
    second = runtime.of("dock")
    assert first.stopped
    assert second is not first
    assert second.kwargs == {**first.kwargs, "adopt": first.answers["access"]}
    assert [kind for kind, _ in recorder.events] == ["processes", "worker_died", "worker_replaced"]
    assert all(not runtime.of(plan.name).stopped for plan in PLANS)


def test_whoever_waits_for_a_dead_dock_gets_its_successor_and_other_news_wait(
    supervisor: Supervisor, runtime: FakeRuntime
) -> None:
    runtime.kill("reward-model")
    dock = runtime.kill("dock")
    # What is heard of first is the other death.
    with pytest.raises(ProcessDied) as caught:
        supervisor.dock.retire("nobody")
    assert caught.value is dock, "the fake client hears once; a real one goes on hearing"
    supervisor.dock.retire("nobody")
    assert retired(runtime) == ["nobody"]
    supervisor.poll(0.1)
    assert runtime.of("reward-model.1").methods() == ["timings"]


def test_a_dock_that_dies_again_and_again_is_for_the_run(supervisor: Supervisor, runtime: FakeRuntime) -> None:
    for _ in range(2):
        runtime.kill("dock")
        supervisor.poll(0.1)
    death = runtime.kill("dock")
    with pytest.raises(ProcessDied) as caught:
        supervisor.poll(0.1)
    assert caught.value is death


def test_a_successor_that_dies_while_it_begins_is_followed_by_another_one(
    supervisor: Supervisor, runtime: FakeRuntime, recorder: FakeRecorder
) -> None:
    runtime.born_dead = {"dock"}
    runtime.kill("dock")
    supervisor.poll(0.1)
    assert [handle.name for handle in runtime.started].count("dock") == 3
    assert recorder.events[-1][0] == "worker_replaced"


def test_a_worker_that_asked_a_dead_dock_is_started_once_more(supervisor: Supervisor, runtime: FakeRuntime) -> None:
    runtime.late_when_new = {"timings"}
    runtime.kill("sampler-0")
    supervisor.poll(0.1)
    runtime.late_when_new = set()
    successor = runtime.of("sampler-0.1")
    successor.dead = ProcessDied("process 'dock' (pid 100) died", "dock", 100)
    supervisor.poll(0.1)
    assert successor.stopped
    assert runtime.of("sampler-0.2").methods()[-1] in ("fetch_weights", "announce_weights", "timings")


def test_a_worker_that_dies_again_and_again_stops_the_run(supervisor: Supervisor, runtime: FakeRuntime) -> None:
    for name in ("sampler-1", "sampler-1.1"):
        runtime.kill(name)
        supervisor.poll(0.1)
    runtime.kill("sampler-1.2")
    with pytest.raises(RunError, match=r"sampler-1\.2.* died; it was started again 2 times .*run\.max_restarts 2") as e:
        supervisor.poll(0.1)
    assert not isinstance(e.value, ProcessDied), "the run does not go back for it"


def test_a_trained_batch_gives_the_starts_back(supervisor: Supervisor, runtime: FakeRuntime) -> None:
    for number in range(5):
        runtime.kill(f"sampler-1.{number}" if number else "sampler-1")
        supervisor.poll(0.1)
        supervisor.batch_trained()
    assert runtime.of("sampler-1.5").methods()[-1] == "announce_weights"


def test_timings_pass_over_the_dead_and_hear_the_late_next_time(supervisor: Supervisor, runtime: FakeRuntime) -> None:
    assert supervisor.timings() == {"rollout": 4.0, "rss_bytes": 40.0}
    runtime.kill("sampler-0")
    runtime.of("sampler-1").late.add("timings")
    assert supervisor.timings()["rollout"] == 2.0
    runtime.of("sampler-1").late.clear()
    asked = runtime.of("sampler-1").methods().count("timings")
    assert supervisor.timings()["rollout"] == 3.0
    assert runtime.of("sampler-1").methods().count("timings") == asked, "one question at a time"


def test_who_waits_for_a_fetch_is_told_of_the_deaths_of_others_only(
    supervisor: Supervisor, runtime: FakeRuntime
) -> None:
    runtime.kill("sampler-0")
    supervisor.fetch()
    runtime.of("sampler-1").dead = ProcessDied("process 'dock' died", "dock", 1)
    with pytest.raises(ProcessDied, match="dock"):
        supervisor.fetch()


def test_the_death_behind_a_workers_error_is_its_cause(supervisor: Supervisor, runtime: FakeRuntime) -> None:
    said = RunError("a stored array is lost")
    runtime.news.append(RunError("the dock's connection ended"))
    death = runtime.kill("trainer")
    assert supervisor.cause(said) is death


def test_an_error_that_nobodys_death_explains_stays(
    supervisor: Supervisor, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tranship.trainer.supervise._CAUSE_S", 0.05)
    said = RunError("no sample could be scored")
    assert supervisor.cause(said) is said
    wrong = UserError("model.path is wrong")
    runtime.kill("trainer")
    assert supervisor.cause(wrong) is wrong


def test_a_process_that_dies_before_it_is_ready_is_started_once_more(
    supervisor: Supervisor, runtime: FakeRuntime
) -> None:
    runtime.born_dead = {"trainer", "sampler-1"}
    before = len(runtime.started)
    supervisor.start()
    names = [handle.name for handle in runtime.started[before:]]
    assert names == ["dock", *(plan.name for plan in PLANS), "trainer", "sampler-1"]
    assert supervisor.trainer is runtime.of("trainer")
    assert supervisor.timings()["rollout"] == 4.0


def test_the_end_stops_everyone(supervisor: Supervisor, runtime: FakeRuntime) -> None:
    runtime.kill("sampler-0")
    supervisor.poll(0.1)
    supervisor.end()
    assert all(handle.stopped for handle in runtime.started)


@pytest.fixture
def ranks(runtime: FakeRuntime) -> None:
    """The first sampler has three ranks. Asked for before `supervisor`, so that the run starts with them."""
    runtime.has_ranks = True


SAMPLER = ("sampler-0", "sampler-0-rank-1", "sampler-0-rank-2")


@pytest.mark.usefixtures("ranks")
class TestRanks:
    """Of one sampler, in processes of their own."""

    def test_they_meet_before_they_get_the_way_of_the_weights_and_all_are_told_of_versions(
        self, runtime: FakeRuntime, supervisor: Supervisor, recorder: FakeRecorder
    ) -> None:
        pieces = [f"pieces of {name}" for name in SAMPLER]
        connected = ("connect_weights", "pieces of trainer", pieces)
        leader, *others = (runtime.of(name) for name in SAMPLER)
        assert leader.calls[0] == ("lead", ["door of sampler-0-rank-1", "door of sampler-0-rank-2"])
        assert connected in runtime.of("trainer").calls
        assert connected in runtime.of("sampler-1").calls, "samplers are alike"
        assert leader.calls[1:] == [("pieces",), connected, ("announce_weights", "version 7")]
        for rank, other in enumerate(others, 1):
            assert other.kwargs["rank"] == rank
            assert other.calls == [("door",), ("pieces",), connected, ("announce_weights", "version 7")]
        assert recorder.events[0][1]["pids"].keys() >= set(SAMPLER)
        assert supervisor.timings()["rollout"] == 6.0
        supervisor.fetch()
        assert leader.calls[-1] == ("fetch_weights", "version 7")
        assert [other.calls[-1] for other in others] == [("announce_weights", "version 7")] * 2, "the first one leads"
        supervisor.end()
        assert all(handle.stopped for handle in runtime.started)

    @pytest.mark.parametrize("dead", SAMPLER)
    def test_with_one_of_them_all_are_started_again_and_others_go_on(
        self, runtime: FakeRuntime, supervisor: Supervisor, recorder: FakeRecorder, dead: str
    ) -> None:
        olds = [runtime.of(name) for name in SAMPLER]
        runtime.late_when_new = {"door", "lead"}
        death = runtime.kill(dead)
        supervisor.poll(0.1)
        assert all(old.stopped for old in olds)
        assert retired(runtime) == ["sampler-0"]
        news = [runtime.of(name) for name in ("sampler-0.1", "sampler-0.1-rank-1", "sampler-0.1-rank-2")]
        assert recorder.events[-1][1] == {
            "name": dead,
            "pid": death.pid,
            "cause": str(death),
            "successor": "sampler-0.1",
        }
        assert [new.methods() for new in news] == [[], ["door"], ["door"]]
        for new in news[1:]:
            new.late.clear()
        supervisor.poll(0.1)
        assert news[0].methods() == ["lead"]
        # What was heard of the others is no news any more.
        runtime.news.extend(ProcessDied(f"process {old.name!r} died", old.name, old.pid) for old in olds)
        for _ in olds:
            supervisor.poll(0.1)
        news[0].late.clear()
        supervisor.poll(0.1)
        assert recorder.events[-1][0] == "worker_replaced"
        assert news[0].methods() == ["lead", "timings", "connect_weights", "fetch_weights", "announce_weights"]
        assert [call[0] for call in news[1].calls if call[0] != "timings"] == [
            "door",
            "connect_weights",
            "announce_weights",
            "announce_weights",
        ]
        assert not runtime.of("sampler-1").stopped

    def test_a_rank_that_dies_before_it_has_met_the_first_is_followed_by_others(
        self, runtime: FakeRuntime, supervisor: Supervisor
    ) -> None:
        runtime.born_dead = {"sampler-0.1-rank-2"}
        runtime.kill("sampler-0")
        supervisor.poll(0.1)
        runtime.news.append(ProcessDied("it died", "sampler-0.1-rank-2", 1))
        supervisor.poll(0.1)
        assert runtime.of("sampler-0.1").stopped
        assert runtime.of("sampler-0.2").methods()[-1] == "announce_weights"

    def test_one_that_dies_before_the_run_begins_is_started_once_more_with_the_others(
        self, runtime: FakeRuntime, supervisor: Supervisor
    ) -> None:
        runtime.born_dead = {"sampler-0-rank-1"}
        before = len(runtime.started)
        supervisor.start()
        names = [handle.name for handle in runtime.started[before:]]
        assert names == ["dock", "trainer", *SAMPLER, "sampler-1", "reward-model", *SAMPLER]


@pytest.fixture
def second_node(runtime: FakeRuntime) -> None:
    """The cluster has a second node. Asked for before `supervisor`, so that the run starts with it."""
    runtime.has_second = True


@pytest.mark.usefixtures("second_node")
class TestWarehouses:
    """Of nodes besides the dock's."""

    def test_each_other_node_has_one_before_the_workers_start(
        self, runtime: FakeRuntime, supervisor: Supervisor, recorder: FakeRecorder
    ) -> None:
        assert [handle.name for handle in runtime.started][:3] == ["dock", "warehouse-second", "trainer"]
        assert runtime.of("warehouse-second").kwargs["access"] == runtime.of("dock").answers["access"]
        assert "warehouse-second" in recorder.events[0][1]["pids"]
        supervisor.end()
        assert all(handle.stopped for handle in runtime.started)

    def test_a_dead_one_has_a_successor_on_its_node_that_takes_its_folder_over(
        self, runtime: FakeRuntime, supervisor: Supervisor, recorder: FakeRecorder
    ) -> None:
        first = runtime.of("warehouse-second")
        runtime.late_when_new = {"left"}
        runtime.kill("warehouse-second")
        supervisor.poll(0.1)
        second = runtime.of("warehouse-second")
        assert first.stopped
        assert second.kwargs == {**first.kwargs, "adopt": "what warehouse-second left"}
        assert recorder.events[-1][0] == "worker_died"
        second.late.clear()
        supervisor.poll(0.1)
        assert recorder.events[-1][0] == "worker_replaced"

    def test_a_death_that_is_heard_of_twice_has_one_successor(
        self, runtime: FakeRuntime, supervisor: Supervisor, recorder: FakeRecorder
    ) -> None:
        for _ in range(4):
            death = runtime.kill("warehouse-second")
            runtime.news.append(death)
            before = len(runtime.started)
            supervisor.poll(0.1)
            supervisor.poll(0.1)
            assert len(runtime.started) == before + 1
            supervisor.batch_trained()
        assert "node_lost" not in [kind for kind, _ in recorder.events]

    def test_one_whose_node_is_gone_is_let_go(
        self, runtime: FakeRuntime, supervisor: Supervisor, recorder: FakeRecorder
    ) -> None:
        runtime.has_second = False
        runtime.kill("warehouse-second")
        before = len(runtime.started)
        supervisor.poll(0.1)
        assert len(runtime.started) == before
        assert recorder.events[-1][0] == "node_lost"
        supervisor.poll(0.1)

    def test_one_that_dies_again_and_again_is_let_go(
        self, runtime: FakeRuntime, supervisor: Supervisor, recorder: FakeRecorder
    ) -> None:
        for _ in range(3):
            runtime.kill("warehouse-second")
            supervisor.poll(0.1)
        assert recorder.events[-1][0] == "node_lost"

    def test_one_whose_node_dies_at_the_start_is_done_without(
        self, runtime: FakeRuntime, supervisor: Supervisor, recorder: FakeRecorder
    ) -> None:
        runtime.born_dead = {"warehouse-second"}
        supervisor.start()
        assert [kind for kind, _ in recorder.events[-2:]] == ["node_lost", "processes"]
        assert "warehouse-second" not in recorder.events[-1][1]["pids"]


@pytest.fixture
def with_controller(runtime: FakeRuntime) -> None:
    """The recipe gives the stage reward a controller of its own. Asked for before `supervisor`."""
    runtime.has_controller = True


@pytest.mark.usefixtures("with_controller")
def test_a_stages_controller_is_there_before_the_workers_and_is_replaced_where_it_served(
    runtime: FakeRuntime, supervisor: Supervisor, recorder: FakeRecorder
) -> None:
    assert [handle.name for handle in runtime.started][:3] == ["dock", "controller-reward", "trainer"]
    assert runtime.of("controller-reward").kwargs["address"] is None
    runtime.kill("controller-reward")
    supervisor.poll(0.1)
    assert runtime.of("controller-reward").kwargs["address"] == "what controller-reward left"
    assert [kind for kind, _ in recorder.events[-2:]] == ["worker_died", "worker_replaced"]
    for _ in range(2):
        runtime.kill("controller-reward")
        supervisor.poll(0.1)
    assert recorder.events[-1][0] == "controller_lost"
    supervisor.batch_trained()
    supervisor.end()
    assert all(handle.stopped for handle in runtime.started)
