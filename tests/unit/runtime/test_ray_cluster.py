"""A cluster of one's own: only on the loopback, gone without a trace; what is missing is said at once."""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tranship.runtime import RuntimeOptions, guard, ray_cluster, start_runtime
from tranship.runtime.processes import descendants, end_all, is_running, is_stopped
from tranship.types import UserError


@pytest.fixture
def short_folder(monkeypatch):
    """An empty folder that stands in for the system's temporary one."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def listening_addresses(pids):
    """Local addresses (hexadecimal) on which processes listen for TCP connections."""
    sockets = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = os.readlink(link)
            except OSError:
                continue
            if target.startswith("socket:["):
                sockets.add(target[8:-1])
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                found.append(fields[1].partition(":")[0])
    return found


def test_a_cluster_of_ones_own_listens_on_the_loopback_and_leaves_nothing(short_folder):
    before = descendants(os.getpid())
    runtime = start_runtime("ray", RuntimeOptions(num_cores=2, object_store_bytes=100 << 20))
    ours = descendants(os.getpid()) - before
    addresses = listening_addresses(ours)
    assert len(addresses) > 3
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    assert set(addresses) <= loopback
    assert len(list(short_folder.iterdir())) == 1
    began = time.monotonic()
    runtime.shutdown()
    runtime.shutdown()
    assert time.monotonic() - began < 10
    assert not [pid for pid in ours if is_running(pid)]
    assert list(short_folder.iterdir()) == []


def test_a_missing_ray_is_said_with_the_remedy(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else find(name))
    with pytest.raises(UserError, match=r"placement.runtime=ray needs the ray extra: pip install 'tranship\[ray\]'"):
        start_runtime("ray")


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:1", "no Ray cluster answers there .*Connection refused"),
        ("auto", "no Ray cluster answers there"),
        ("ray://127.0.0.1:1", "is not an address: use HOST:PORT, or auto"),
        ("localhost", "is not an address"),
    ],
)
def test_an_address_without_a_cluster_is_refused_at_once(address, words, short_folder, monkeypatch):
    # Others on this machine may have a cluster, which `auto` would join.
    monkeypatch.setattr(ray_cluster.services, "find_gcs_addresses", set)
    monkeypatch.setattr(ray_cluster.services, "find_bootstrap_address", lambda folder: None)
    began = time.monotonic()
    with pytest.raises(UserError, match=rf"placement.ray_address '{address}'.*{words}"):
        start_runtime("ray", RuntimeOptions(ray_address=address))
    assert time.monotonic() - began < 8


def test_a_long_temporary_folder_is_not_used(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "a-folder-with-a-long-name"))
    assert ray_cluster._short_folder() == "/tmp"


def test_an_address_needs_ray():
    with pytest.raises(UserError, match=r"ray_address '127.0.0.1:1' needs placement.runtime=ray"):
        start_runtime("inline", RuntimeOptions(ray_address="127.0.0.1:1"))


def test_an_unknown_runtime_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match="inline, ray"):
        start_runtime("threads")


def test_a_store_too_small_for_ray_is_refused():
    with pytest.raises(UserError, match="object_store_bytes 1000 is too small"):
        start_runtime("ray", RuntimeOptions(object_store_bytes=1000))


def test_folders_of_dead_drivers_are_swept(short_folder):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    dead, alive = short_folder / f"tshipray-{gone.pid}-abc", short_folder / f"tranship-ray-{os.getpid()}-abc"
    other = short_folder / "tshipray-notes"
    for folder in (dead, alive, other):
        (folder / "deep").mkdir(parents=True)
    ray_cluster.sweep_folders()
    assert sorted(short_folder.iterdir()) == sorted([alive, other])


def guarded(tmp_path):
    """(guard process, a sleeping process, the guarded folder)."""
    folder = tmp_path / "folder"
    folder.mkdir()
    command = [sys.executable, "-I", "-S", guard.__file__, str(folder)]
    keeper = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    return keeper, sleeper, folder


def test_the_guard_ends_what_a_killed_driver_leaves_and_spares_a_reused_number(tmp_path):
    keeper, sleeper, folder = guarded(tmp_path)
    reused = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    lines = f"{sleeper.pid} {guard.start_time(sleeper.pid)}\n{reused.pid} 1\n999999999 5\nhalf"
    keeper.communicate(lines, timeout=10)
    assert sleeper.wait(10) == -9
    assert is_running(reused.pid)
    assert not folder.exists()
    reused.kill()
    reused.wait()


def test_the_guard_ends_what_carries_the_clusters_mark_though_nobody_named_it(tmp_path):
    keeper, sleeper, folder = guarded(tmp_path)
    orphan = subprocess.Popen(["sleep", "60"], env={**os.environ, guard.MARK: str(folder)})
    stranger = subprocess.Popen(["sleep", "60"], env={**os.environ, guard.MARK: str(folder) + "-other"})
    assert guard.members(str(folder)) == [orphan.pid]
    keeper.stdin.close()
    assert orphan.wait(timeout=10) == -signal.SIGKILL
    keeper.wait(timeout=10)
    assert stranger.poll() is None
    for process in (stranger, sleeper):
        process.kill()
        process.wait()


def test_the_guard_does_nothing_after_a_good_end(tmp_path):
    keeper, sleeper, folder = guarded(tmp_path)
    keeper.communicate(f"{sleeper.pid} {guard.start_time(sleeper.pid)}\ndone\n", timeout=10)
    assert is_running(sleeper.pid)
    assert folder.exists()
    sleeper.kill()
    sleeper.wait()


def test_processes_are_seen_as_they_are():
    script = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()']); input()"
    parent = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE)
    deadline = time.monotonic() + 10
    while not (children := descendants(parent.pid)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(children) == 1
    assert children < descendants(os.getpid())
    os.kill(parent.pid, 19)
    while not is_stopped(parent.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_stopped(parent.pid)
    assert is_running(parent.pid)
    end_all([parent.pid, *children], grace_s=0.1)
    assert not is_running(parent.pid)
    assert not any(is_running(pid) for pid in children)
    parent.wait()


@pytest.mark.parametrize(("host", "is_local"), [("127.0.0.1", True), ("0.0.0.0", False)])
def test_a_cluster_on_the_loopback_alone_is_told_from_one_of_the_network(monkeypatch, host, is_local):
    monkeypatch.setattr(ray_cluster.ray.util, "get_node_ip_address", lambda: "127.0.0.2")
    with socket.create_server((host, 0)) as server:
        assert ray_cluster._is_local("127.0.0.1", server.getsockname()[1]) is is_local
    with pytest.raises(OSError, match="refused"):
        ray_cluster._is_local("127.0.0.1", 1)
