"""What is promised of real processes: deaths, limits, endings, and what a process is given."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tranship.runtime import CallTimeout, ProcessDied, RuntimeOptions, start_runtime
from tranship.runtime.device import num_cores
from tranship.runtime.processes import descendants, is_running
from tranship.types import RunError, UserError

HOSTED = f"{Path(__file__).parents[2] / 'contract' / 'hosted_objects.py'}"
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def processes():
    with start_runtime("ray", RuntimeOptions(num_cores=2, object_store_bytes=200 << 20)) as running:
        yield running


def start(runtime, kind, what, **kwargs):
    """An object under a name of its own, built."""
    start.count = getattr(start, "count", 0) + 1
    handle = runtime.start(f"{what.lower()}-{start.count}", f"{HOSTED}:{what}", kwargs, kind=kind, num_threads=1)
    handle.wait_ready(LIMIT_S)
    return handle


def poll_for(runtime, seconds):
    """Poll, whatever is heard."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        runtime.poll(1.0)
        runtime.events()


@pytest.mark.parametrize(("method", "arguments"), [("kill_self", ()), ("leave", (3,))])
def test_the_death_of_a_loop_is_noticed_in_seconds(processes, method, arguments):
    bomb = start(processes, "loop", "Bomb", fuse=-1)
    pid = bomb.pid
    pending = bomb.submit(method, *arguments)
    before = time.monotonic()
    with pytest.raises(ProcessDied, match=rf"process '{bomb.name}' \(pid {pid}\) died: \w+") as caught:
        poll_for(processes, 20)
    assert time.monotonic() - before < 5.0
    assert (caught.value.name, caught.value.pid) == (bomb.name, pid)
    assert not bomb.alive()
    with pytest.raises(ProcessDied, match=f"pid {pid}"):
        pending.result(5)
    with pytest.raises(ProcessDied, match=f"pid {pid}"):
        bomb.call("greet", timeout_s=5)
    processes.poll(0.1)
    bomb.stop()
    again = processes.start(bomb.name, f"{HOSTED}:Bomb", {"fuse": -1}, kind="loop")
    assert again.call("greet", timeout_s=LIMIT_S) == "hello"
    again.stop()


def test_a_process_killed_from_outside_while_it_works_is_noticed(processes):
    bomb = start(processes, "loop", "Bomb", fuse=-1)
    pending = bomb.submit("sleep", 600)
    os.kill(bomb.pid, signal.SIGKILL)
    before = time.monotonic()
    with pytest.raises(ProcessDied, match=f"pid {bomb.pid}"):
        pending.result(20)
    assert time.monotonic() - before < 5.0
    with pytest.raises(ProcessDied):
        processes.poll(5.0)
    bomb.stop()


def test_a_stopped_process_is_named_and_ended(processes):
    bomb = start(processes, "loop", "Bomb", fuse=-1)
    pid = bomb.pid
    os.kill(pid, signal.SIGSTOP)
    before = time.monotonic()
    with pytest.raises(ProcessDied, match=rf"'{bomb.name}' \(pid {pid}\) is stopped"):
        poll_for(processes, 30)
    assert time.monotonic() - before < 15.0
    bomb.stop()
    assert not is_running(pid)


def test_a_limit_names_what_was_awaited(processes):
    bomb = start(processes, "loop", "Bomb", fuse=-1)
    with pytest.raises(CallTimeout, match=rf"'{bomb.name}' \(pid {bomb.pid}\): 'sleep' did not answer within 0.3 s"):
        bomb.call("sleep", 3, timeout_s=0.3)
    assert bomb.call("greet", timeout_s=LIMIT_S) == "hello"
    bomb.stop()


@pytest.mark.parametrize(("kind", "words"), [("odd", "OddError in process .*: 1 and 2"), ("exit", "SystemExit in")])
def test_an_exception_that_cannot_travel_arrives_in_words(processes, kind, words):
    counter = start(processes, "service", "Counter", start=0)
    with pytest.raises(RunError, match=words) as caught:
        counter.call("fail", kind, timeout_s=LIMIT_S)
    assert "hosted_objects.py" in caught.value.__notes__[0]
    assert counter.call("read", timeout_s=LIMIT_S) == 0
    counter.stop()


def test_calls_to_a_service_that_died_say_so(processes):
    counter = start(processes, "service", "Counter", start=0)
    proxy = processes.service_proxy(counter.name)
    os.kill(counter.pid, signal.SIGKILL)
    with pytest.raises(ProcessDied, match=counter.name):
        proxy.call("read")
    with pytest.raises(ProcessDied, match=counter.name):
        processes.poll(10.0)
    counter.stop()


def test_a_process_has_the_threads_and_the_folder_that_it_was_given(processes, monkeypatch):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    given = processes.start("given", f"{HOSTED}:Environment", {}, kind="service", num_threads=1)
    free = processes.start("free", f"{HOSTED}:Environment", {}, kind="service")
    facts = given.call("facts", timeout_s=LIMIT_S)
    assert facts == {"threads": 1, "omp": "1", "spin": "0", "folder": os.getcwd()}
    facts = free.call("facts", timeout_s=LIMIT_S)
    assert facts == {"threads": num_cores(), "omp": None, "spin": "0", "folder": os.getcwd()}
    given.stop()
    free.stop()


def test_what_a_hosted_process_starts_dies_with_it(processes):
    parent = start(processes, "loop", "Parent")
    child = parent.call("child_pid", timeout_s=LIMIT_S)
    assert is_running(child)
    os.kill(parent.pid, signal.SIGKILL)
    with pytest.raises(ProcessDied):
        poll_for(processes, 10)
    deadline = time.monotonic() + 5
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)
    parent.stop()


def test_an_array_that_is_late_or_lost_is_an_error_not_a_wait(processes):
    bomb = start(processes, "loop", "Bomb", fuse=-1)
    ref = bomb.actor.call.remote("sleep", (600,), {})
    with pytest.raises(RunError, match=r"a stored array did not arrive within 0\.3 s"):
        processes.objects.get(ref, 0.3)
    os.kill(bomb.pid, signal.SIGKILL)
    with pytest.raises(RunError, match="a stored array is lost"):
        processes.objects.get(ref, 20)
    with pytest.raises(ProcessDied):
        poll_for(processes, 10)
    bomb.stop()


def test_calls_made_while_the_object_is_being_built_are_answered_after(processes):
    slow = processes.start("slow", f"{HOSTED}:SlowStart", {"seconds": 2.0}, kind="loop")
    pending = [slow.submit("greet"), slow.submit("greet")]
    assert [call.result(LIMIT_S) for call in pending] == ["hello", "hello"]
    slow.stop()
    broken = processes.start("broken", f"{HOSTED}:Broken", {}, kind="loop")
    with pytest.raises(UserError, match="give a folder"):
        broken.call("greet", timeout_s=LIMIT_S)
    broken.stop()


def test_a_stop_waits_for_the_pass_but_not_for_ever(processes, tmp_path):
    bomb = start(processes, "loop", "Bomb", fuse=-1)
    bomb.submit("sleep", 600)
    began = time.monotonic()
    bomb.stop(timeout_s=0.5)
    assert time.monotonic() - began < 8
    assert not is_running(bomb.pid)


DRIVER = """
import os, sys, time
from tranship.runtime import start_runtime, RuntimeOptions
from tranship.trainer.signals import StopRequest
runtime = start_runtime("ray", RuntimeOptions(num_cores=2, object_store_bytes=100 << 20))
hosted = {hosted!r}
loop = runtime.start("busy", hosted + ":Bomb", {{"fuse": -1}}, kind="loop")
service = runtime.start("counter", hosted + ":Counter", {{"start": 0}}, kind="service")
follower = runtime.start("follower", hosted + ":Follower", {{"counter": runtime.service_proxy("counter")}}, kind="loop")
pids = [handle.pid for handle in (loop, service, follower)]
loop.wait_ready(60)
loop.submit("sleep", 600)
with StopRequest(lambda: None) as stop:
    print(os.getpid(), *pids, flush=True)
    while not stop.requested:
        runtime.poll(1.0)
print("interrupted", follower.call("try_fail", timeout_s=30), flush=True)
runtime.shutdown()
print("ended", flush=True)
"""


def ignored(pid):
    """The signals that a process ignores."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (mask,) = (int(line.split()[1], 16) for line in lines if line.startswith("SigIgn:"))
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


def running(pids):
    """Those of `pids` that still run."""
    return {pid for pid in pids if is_running(pid)}


@pytest.fixture
def driver(tmp_path):
    """A driver in a process group of its own, with its hosted processes: (process, their ids, all descendants)."""
    script = tmp_path / "driver.py"
    script.write_text(DRIVER.format(hosted=HOSTED))
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    hosted = [int(word) for word in process.stdout.readline().split()[1:]]
    assert len(hosted) == 3
    everyone = descendants(process.pid) | {process.pid}
    assert set(hosted) < everyone
    yield process, hosted, everyone
    process.kill()
    process.wait()
    for pid in running(everyone):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_killed_driver_leaves_no_process(driver):
    process, _, everyone = driver
    process.kill()
    process.wait()
    deadline = time.monotonic() + 15
    while (left := running(everyone)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, [Path(f"/proc/{pid}/cmdline").read_text() for pid in left]


@pytest.mark.slow
def test_ctrl_c_reaches_the_driver_alone_and_ends_everything(driver):
    process, hosted, everyone = driver
    if sys.platform == "linux":
        assert all(signal.SIGINT in ignored(pid) for pid in hosted)
    os.killpg(process.pid, signal.SIGINT)
    for pid in hosted:
        os.kill(pid, signal.SIGINT)
    before = time.monotonic()
    output, _ = process.communicate(timeout=30)
    assert time.monotonic() - before < 10.0
    assert output.split("\n")[:2] == ["interrupted steps -1 is negative: use at least 1", "ended"]
    assert process.returncode == 0
    assert not running(everyone)


def test_a_call_to_a_stopped_process_ends_in_seconds_and_names_it(processes):
    bomb = start(processes, "loop", "Bomb", fuse=-1)
    other = start(processes, "loop", "Bomb", fuse=-1)
    os.kill(bomb.pid, signal.SIGSTOP)
    before = time.monotonic()
    with pytest.raises(ProcessDied, match=rf"'{bomb.name}' \(pid {bomb.pid}\) is stopped"):
        bomb.call("greet", timeout_s=LIMIT_S)
    assert time.monotonic() - before < 20.0
    assert other.call("greet", timeout_s=LIMIT_S) == "hello"
    with pytest.raises(ProcessDied, match="is stopped"):
        processes.poll(1.0)
    processes.poll(0.1)
    bomb.stop()
    other.stop()


def test_what_went_wrong_in_a_process_that_was_stopped_is_no_news(processes):
    bomb = start(processes, "loop", "Bomb", fuse=-1)
    other = start(processes, "loop", "Bomb", fuse=-1)
    os.kill(bomb.pid, signal.SIGKILL)
    with pytest.raises(ProcessDied):
        bomb.call("greet", timeout_s=20)
    with pytest.raises(CallTimeout):
        other.call("sleep", 3, timeout_s=2.5)
    bomb.stop()
    poll_for(processes, 1.5)
    other.stop()
