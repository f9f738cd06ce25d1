"""What every runtime promises, and what only one of real processes has to."""

import time
from pathlib import Path

import pytest

from tranship.runtime import RUNTIMES, RuntimeOptions, start_runtime
from tranship.types import RunError, UserError

HOSTED = f"{Path(__file__).with_name('hosted_objects.py')}"
LIMIT_S = 60.0


@pytest.fixture(params=sorted(RUNTIMES), scope="module")
def runtime(request):
    with start_runtime(request.param, RuntimeOptions(num_cores=2, object_store_bytes=200 << 20)) as running:
        yield running


def start(runtime, kind, what, **kwargs):
    """An object under a name of its own, built."""
    start.count = getattr(start, "count", 0) + 1
    handle = runtime.start(f"{what.lower()}-{start.count}", f"{HOSTED}:{what}", kwargs, kind=kind, num_threads=1)
    handle.wait_ready(LIMIT_S)
    return handle


def listen(runtime, handle, until, timeout_s=LIMIT_S):
    """The events of `handle` up to the one for which `until` is true."""
    heard = []
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        runtime.poll(0.5)
        for name, event in runtime.events():
            if name == handle.name:
                heard.append(event)
                if until(event):
                    return heard
    raise AssertionError(f"not heard in {timeout_s} s; heard {heard}")


def test_a_method_gets_its_arguments_and_its_result_comes_back(runtime):
    counter = start(runtime, "service", "Counter", start=5)
    assert counter.call("add", 2, times=3, timeout_s=LIMIT_S) == 11
    pending = counter.submit("add", 1)
    assert pending.result(LIMIT_S) == 12
    assert pending.done()
    assert counter.alive()
    counter.stop()
    assert not counter.alive()
    with pytest.raises(RunError):
        counter.call("read", timeout_s=LIMIT_S)


@pytest.mark.parametrize(
    ("kind", "expected", "words"),
    [
        ("user", UserError, "steps -1 is negative: use at least 1"),
        ("json", ValueError, "Expecting property name"),
        ("key", KeyError, "missing"),
    ],
)
def test_what_a_method_raises_arrives_with_its_type(runtime, kind, expected, words):
    counter = start(runtime, "service", "Counter", start=0)
    with pytest.raises(expected, match=words) as caught:
        counter.call("fail", kind, timeout_s=LIMIT_S)
    assert isinstance(caught.value, expected)
    assert "Ray" not in type(caught.value).__name__
    assert counter.call("read", timeout_s=LIMIT_S) == 0
    counter.stop()


def test_an_unknown_method_is_an_error_of_the_caller_alone(runtime):
    stepper = start(runtime, "loop", "Stepper", until=0)
    with pytest.raises(AttributeError, match="nonsense"):
        stepper.call("nonsense", timeout_s=LIMIT_S)
    assert stepper.call("more", 1, timeout_s=LIMIT_S) == 1
    stepper.stop()


def test_what_a_factory_raises_arrives_by_the_time_it_must_be_ready(runtime):
    with pytest.raises(UserError, match="give a folder"):
        start(runtime, "loop", "Broken")
    with pytest.raises(UserError, match="has no 'Nobody'"):
        start(runtime, "service", "Nobody")


def test_a_loop_works_and_its_events_keep_their_order(runtime):
    stepper = start(runtime, "loop", "Stepper", until=20)
    heard = listen(runtime, stepper, lambda event: "done" in event)
    assert [event["step"] for event in heard[:-1]] == list(range(1, 21))
    assert heard[-1] == {"done": True, "numbers": [1, 2.5, None], "text": "end"}
    assert stepper.call("more", 3, timeout_s=LIMIT_S) == 23
    heard = listen(runtime, stepper, lambda event: "done" in event)
    assert [event["step"] for event in heard[:-1]] == [21, 22, 23]
    facts = stepper.call("facts", timeout_s=LIMIT_S)
    assert facts["threads"] == 1, "passes and calls run on one thread"
    assert facts["pid"] == stepper.pid
    stepper.stop()


def test_an_idle_poll_waits_no_longer_than_told(runtime):
    stepper = start(runtime, "loop", "Stepper", until=0)
    runtime.poll(0.2)
    runtime.events()
    before = time.monotonic()
    assert not runtime.poll(0.3)
    assert 0.25 < time.monotonic() - before < 2.0
    stepper.stop()


def test_a_loop_that_raises_is_told_once_with_its_type(runtime):
    bomb = start(runtime, "loop", "Bomb", fuse=3)
    with pytest.raises(UserError, match="fuse 3 is too short") as caught:
        listen(runtime, bomb, lambda event: False, timeout_s=20)
    assert any(bomb.name in note for note in caught.value.__notes__)
    bomb.stop()


def test_a_name_is_taken_only_once_and_free_again_after_a_stop(runtime):
    runtime.start("same", f"{HOSTED}:Counter", {"start": 1}, kind="service").wait_ready(LIMIT_S)
    with pytest.raises(RunError, match="'same' is already running"):
        runtime.start("same", f"{HOSTED}:Counter", {"start": 1}, kind="service")
    assert runtime.service_proxy("same").call("read") == 1


def test_a_loop_asks_a_service_that_others_change(runtime):
    counter = start(runtime, "service", "Counter", start=0)
    follower = start(runtime, "loop", "Follower", counter=runtime.service_proxy(counter.name))
    listen(runtime, follower, lambda event: event == {"saw": 0})
    for value in (1, 2, 3):
        counter.call("add", 1, timeout_s=LIMIT_S)
        listen(runtime, follower, lambda event, value=value: event == {"saw": value})
    assert follower.call("try_fail", timeout_s=LIMIT_S) == "steps -1 is negative: use at least 1"
    follower.stop()
    counter.stop()


def test_a_proxy_exists_only_for_a_running_service(runtime):
    stepper = start(runtime, "loop", "Stepper", until=0)
    for name in (stepper.name, "nobody"):
        with pytest.raises(RunError, match=f"no running service called '{name}'"):
            runtime.service_proxy(name)
    stepper.stop()


def test_stored_arrays_are_copies_that_others_can_read_but_not_change(runtime):
    writer, reader = (start(runtime, "loop", "Bucketer") for _ in range(2))
    announcement = writer.call("publish", 3_000_000, 7, timeout_s=LIMIT_S)
    assert reader.call("total", announcement, timeout_s=LIMIT_S) == (21_000_000, False)
    assert int(runtime.objects.get(announcement["refs"][0], 20).sum()) == 21_000_000
    writer.stop()
    reader.stop()


def test_an_event_that_no_wire_carries_is_refused_where_it_is_emitted(runtime):
    stepper = start(runtime, "loop", "Stepper", until=0)
    with pytest.raises(TypeError):
        stepper.call("say_something_odd", timeout_s=LIMIT_S)
    runtime.poll(0.1)
    assert all(name != stepper.name for name, _ in runtime.events())
    stepper.stop()


def test_an_object_is_closed_when_it_is_stopped_and_loops_before_services(tmp_path, runtime):
    file = tmp_path / "closed"
    stepper = start(runtime, "loop", "Stepper", until=0, closed_file=str(file))
    stepper.stop()
    assert file.read_text() == f"{stepper.name}\n"
