"""The pool: a bad call costs its own sample and nothing else, and no process is left."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tranship.rewards import RewardPool, RewardRequest, Term
from tranship.rewards.log import MAX_LOG_BYTES
from tranship.types import RunError, Score, UserError

FUNCTIONS = """
import os, re, signal, subprocess, sys, threading, time

def bad_rows(data_source, solution_str, ground_truth, extra_info=None, weight=1.0):
    kind = extra_info["kind"]
    print("prints of users must not reach the pipe")
    if kind == "raise":
        raise ValueError("bad\\nrow")
    if kind == "sleep":
        time.sleep(60)
    if kind == "exit":
        os._exit(1)
    if kind == "sys.exit":
        sys.exit(3)
    if kind == "none":
        return None
    if kind == "nan":
        return float("nan")
    if kind == "text":
        return "1.0"
    if kind == "power":
        return 10 ** 10 ** 8
    if kind == "regex":
        re.match(r"(a+)+$", "a" * 60 + "b")
    if kind == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if kind == "memory":
        return len(bytearray(1 << 33))
    if kind == "hoard":
        held = []
        while True:
            held.append(bytearray(1 << 22))
    if kind == "peak":
        peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
        return {"score": 1, "rss": int(peak.split()[1]) << 10}
    if kind == "shout":
        for _ in range(30):
            os.write(1, b"x" * (1 << 20))
    if kind == "write":
        for fd in range(3, 20):
            try:
                os.write(fd, b"\\xff\\x00\\x00\\x00" + b"\\xc1" * 255)
            except OSError:
                pass
    if kind == "read":
        return float(sys.stdin.read() == "")
    if kind == "slow":
        time.sleep(0.5)
    if kind == "child":
        child = subprocess.Popen(["sleep", "60"])
        open(extra_info["file"], "w").write(f"{os.getpid()} {child.pid}")
        time.sleep(60)
    if kind == "nap":
        with open(extra_info["file"], "a") as noted:
            noted.write(f"{os.getpid()}\\n")
        time.sleep(1.0)
    if kind == "masked":
        return {"masked": True}
    return weight * float(solution_str == ground_truth)

def positional(source, text, truth, info):
    return float(text == truth)

def two_arguments(source, text):
    return 1.0

async def asynchronous(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0

def echo(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1.0, "pid": os.getpid(), "truth": ground_truth, "info": extra_info}

not_a_function = 3
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "functions.py"
    path.write_text(FUNCTIONS)
    return path


def row(kind: str, **info: Any) -> RewardRequest:
    return RewardRequest("s", "1", "1", {"kind": kind, **info})


def one(function: str, **args: Any) -> list[Term]:
    return [Term("it", function, args)]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def eventually(condition: Any, limit_s: float = 10.0) -> bool:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def collect_until_fault(pool: RewardPool, scores: list[Score]) -> None:
    for _ in range(100):
        pool.wait(0.1)
        scores += [score for _, score in pool.poll()]


def test_every_bad_row_costs_itself_alone(file: Path):
    kinds = ["right", "raise", "sleep", "exit", "none", "nan", "text", "right"]
    with RewardPool(one(f"{file}:bad_rows"), 1, 2.0) as pool:
        started = time.monotonic()
        scores = pool.score_all([row(kind) for kind in kinds])
        assert time.monotonic() - started < 10
        assert [score.status for score in scores] == ["scored", *["invalid"] * 6, "scored"]
        assert [score.value for score in scores] == [1.0, *[None] * 6, 1.0]
        assert [score.reason for score in scores[1:7]] == [
            "ValueError: bad row",
            "timed out after 2 s",
            "the reward process exited with code 1",
            "returned None",
            "returned nan",
            "returned str '1.0', not a number",
        ]
        assert pool.score_all([row("right")]) == [Score("scored", 1.0)]


def test_loops_inside_c_code_are_stopped(file: Path):
    with RewardPool(one(f"{file}:bad_rows"), 2, 1.0) as pool:
        started = time.monotonic()
        scores = pool.score_all([row("power"), row("regex"), row("right")])
        assert time.monotonic() - started < 10
        assert [score.reason for score in scores] == ["timed out after 1 s", "timed out after 1 s", ""]
        assert pool.score_all([row("right")])[0].value == 1.0


def test_other_ends_of_a_call(file: Path):
    expected = {
        "sys.exit": Score("invalid", reason="SystemExit: 3"),
        "segfault": Score("invalid", reason="the reward process was killed by signal SIGSEGV"),
        "write": Score("invalid", reason="the reward process wrote to the pipe of its results"),
        "read": Score("scored", 1.0),
        "masked": Score("masked"),
        "right": Score("scored", 1.0),
    }
    with RewardPool(one(f"{file}:bad_rows"), 1, 5.0) as pool:
        assert pool.score_all([row(kind) for kind in expected]) == list(expected.values())


def test_memory_can_be_bounded(file: Path):
    with RewardPool(one(f"{file}:bad_rows"), 1, 5.0, memory_bytes=1 << 32) as pool:
        scores = pool.score_all([row("memory"), row("right")])
    assert scores[0].reason.startswith("MemoryError")
    assert scores[1].value == 1.0


def test_allocating_without_end_costs_at_most_the_limit(file: Path):
    with RewardPool(one(f"{file}:bad_rows"), 1, 60.0, memory_bytes=1 << 29) as pool:
        (score,) = pool.score_all([row("hoard")])
        assert score.reason == "MemoryError:"
        assert pool.score_all([row("peak")])[0].extra["rss"] < 1 << 29


def test_the_limit_counts_from_the_start_of_a_call_and_not_from_the_queue(file: Path):
    with RewardPool(one(f"{file}:bad_rows"), 1, 1.0) as pool:
        assert all(score.value == 1.0 for score in pool.score_all([row("slow")] * 4))


def test_workers_run_side_by_side(file: Path):
    with RewardPool(one(f"{file}:bad_rows"), 4, 5.0) as pool:
        started = time.monotonic()
        assert all(score.value == 1.0 for score in pool.score_all([row("slow")] * 8))
        assert time.monotonic() - started < 2.5


def test_arguments_and_values_of_any_size_reach_the_function(file: Path):
    with RewardPool(one(f"{file}:bad_rows", weight=0.5), 1, 5.0) as pool:
        assert pool.score_all([row("right")])[0].value == 0.5
    info = {"text": "é" * 300_000, "big": 2**80, "nested": [{"a": None}], "surrogate": "\ud800"}
    with RewardPool(one(f"{file}:echo"), 1, 5.0) as pool:
        first, second = pool.score_all(
            [RewardRequest("s", "x" * 3_000_000, {"n": [1, 2.5]}, info), RewardRequest("s", "x")]
        )
    assert first.extra["info"] == {**info, "big": float(2**80)}
    assert first.extra["truth"] == {"n": [1, 2.5]}
    assert (second.extra["info"], second.extra["truth"]) == (None, None)


def test_submit_and_poll_do_not_wait_and_the_owner_is_woken(file: Path):
    wakeup = threading.Event()
    with RewardPool(one(f"{file}:bad_rows"), 1, 5.0, wakeup=wakeup) as pool:
        started = time.monotonic()
        pool.submit(("a", 1), row("slow"))
        assert pool.poll() == []
        assert time.monotonic() - started < 0.3
        assert pool.num_pending == 1
        assert wakeup.wait(10)
        assert pool.wait(0)
        assert pool.poll() == [(("a", 1), Score("scored", 1.0))]
        assert (pool.num_pending, pool.wait(0.05)) == (0, False)


def test_a_storm_of_bad_rows_loses_none(file: Path):
    expected = {
        "right": "",
        "raise": "ValueError: bad row",
        "exit": "the reward process exited with code 1",
        "none": "returned None",
        "segfault": "the reward process was killed by signal SIGSEGV",
        "sleep": "timed out after 0.5 s",
    }
    chosen = random.Random(0).choices(list(expected), weights=[20, 4, 2, 4, 2, 1], k=120)
    with RewardPool(one(f"{file}:bad_rows"), 3, 0.5) as pool:
        scores = pool.score_all([row(kind) for kind in chosen])
    assert [score.reason for score in scores] == [expected[kind] for kind in chosen]
    assert [score.value for score in scores] == [1.0 if kind == "right" else None for kind in chosen]


def test_functions_that_take_the_four_by_position(file: Path):
    with RewardPool(one(f"{file}:positional"), 1, 5.0) as pool:
        assert pool.score_all([row("right")])[0].value == 1.0


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("{file}:absent", {}, "has no 'absent'"),
        ("{file}:not_a_function", {}, "is a int, not a function"),
        (
            "{file}:two_arguments",
            {},
            r"two_arguments\(source, text\) cannot be called with \(data_source, solution_str",
        ),
        ("{file}:bad_rows", {"wieght": 1}, "'wieght'"),
        ("{folder}/nope.py:f", {}, "there is no file"),
        ("{folder}/broken.py:f", {}, "does not import: ZeroDivisionError"),
        ("{folder}/exits.py:f", {}, "exited with code 7 while it was imported"),
        ("no_such_module:f", {}, "importing 'no_such_module' failed"),
        ("exact_intger", {}, "use one of: boxed, "),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_at_the_start(file: Path, name: str, args: dict, message: str):
    (file.parent / "broken.py").write_text("1 / 0")
    (file.parent / "exits.py").write_text("import os; os._exit(7)")
    started = time.monotonic()
    with pytest.raises(UserError, match=message) as caught:
        RewardPool(one(name.format(file=file, folder=file.parent), **args), 1, 5.0)
    assert time.monotonic() - started < 10
    assert str(caught.value).startswith("reward.function")
    assert "\n" not in str(caught.value)


def test_an_import_that_hangs_is_refused(file: Path):
    (file.parent / "hangs.py").write_text("import time; time.sleep(60)")
    with pytest.raises(UserError, match="was not ready after 1 s"):
        RewardPool(one(f"{file.parent / 'hangs.py'}:f"), 1, 5.0, start_timeout_s=1.0)


def test_a_function_that_no_longer_imports_stops_the_pool(file: Path, tmp_path: Path):
    path = tmp_path / "changes.py"
    path.write_text(FUNCTIONS)
    with RewardPool(one(f"{path}:bad_rows"), 1, 5.0) as pool:
        path.write_text("1 / 0")
        pool.submit(0, row("exit"))
        pool.submit(1, row("right"))
        scores: list[Score] = []
        with pytest.raises(RunError, match="ZeroDivisionError"):
            collect_until_fault(pool, scores)
        assert [score.reason for score in scores] in ([], ["the reward process exited with code 1"])


def test_prints_and_tracebacks_go_to_the_log(file: Path, tmp_path: Path):
    log = tmp_path / "reward.log"
    with RewardPool(one(f"{file}:bad_rows"), 1, 5.0, log_file=log) as pool:
        pool.score_all([row("raise"), row("right")])
    text = log.read_text()
    assert text.count("prints of users must not reach the pipe") == 2
    assert text.count("Traceback") == 1
    assert "functions.py" in text


def test_what_is_printed_without_end_does_not_fill_the_disk(file: Path, tmp_path: Path):
    log = tmp_path / "reward.log"
    with RewardPool(one(f"{file}:bad_rows"), 1, 20.0, log_file=log) as pool:
        assert pool.score_all([row("shout"), row("right")])[1].value == 1.0
    text = log.read_bytes()
    assert MAX_LOG_BYTES <= len(text) < MAX_LOG_BYTES + 100
    assert text.endswith(b"\n[10000000 bytes are written: what is printed from here on is lost]\n")


def test_an_idle_worker_that_dies_is_replaced(file: Path):
    with RewardPool(one(f"{file}:echo"), 1, 5.0) as pool:
        pid = pool.score_all([row("right")])[0].extra["pid"]
        os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: not alive(pid))
        assert pool.score_all([row("right")])[0].value == 1.0
        assert pool.score_all([row("right")])[0].extra["pid"] != pid


@pytest.mark.parametrize("kills", [1, 2])
def test_a_sample_whose_process_somebody_kills_is_tried_once_more(file: Path, tmp_path: Path, kills: int):
    noted = tmp_path / "pids"
    noted.touch()
    with RewardPool(one(f"{file}:bad_rows"), 1, 20.0) as pool:
        pool.submit(0, row("nap", file=str(noted)))
        for number in range(kills):
            assert eventually(lambda number=number: len(noted.read_text().splitlines()) > number)
            os.kill(int(noted.read_text().splitlines()[number]), signal.SIGKILL)
        scores: list[Score] = []
        assert eventually(lambda: scores.extend(score for _, score in pool.poll()) or scores)
    if kills == 1:
        assert scores[0].value == 1.0
    else:
        assert scores[0].reason == "the reward process was killed by signal SIGKILL"


def test_what_a_function_started_ends_with_its_call(file: Path, tmp_path: Path):
    noted = tmp_path / "pids"
    with RewardPool(one(f"{file}:bad_rows"), 1, 1.0) as pool:
        assert pool.score_all([row("child", file=str(noted))])[0].reason == "timed out after 1 s"
    worker, grandchild = (int(pid) for pid in noted.read_text().split())
    assert eventually(lambda: not alive(worker) and not alive(grandchild))


def test_closing_ends_running_calls_and_twice_is_fine(file: Path):
    pool = RewardPool(one(f"{file}:bad_rows"), 2, 60.0)
    for key in range(4):
        pool.submit(key, row("power"))
    time.sleep(0.2)
    started = time.monotonic()
    pool.close()
    pool.close()
    assert time.monotonic() - started < 5


@pytest.mark.skipif(sys.platform != "linux", reason="needs the kernel's help to stop C code")
def test_workers_end_when_their_parent_is_killed(file: Path, tmp_path: Path):
    script = tmp_path / "owner.py"
    script.write_text(
        "import sys, time\n"
        "from tranship.rewards import RewardPool, RewardRequest, Term\n"
        f"pool = RewardPool([Term('it', {f'{file}:bad_rows'!r})], 2, 60.0)\n"
        "pool.submit(0, RewardRequest('s', '1', '1', {'kind': 'power'}))\n"
        "time.sleep(0.3)\n"
        "print(*[worker._process.pid for worker in pool._workers], flush=True)\n"
        "time.sleep(60)\n"
    )
    owner = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(pids) == 2
    assert all(alive(pid) for pid in pids)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    assert eventually(lambda: not any(alive(pid) for pid in pids), 5.0)


def test_workers_load_no_torch_and_the_package_neither():
    code = "import sys, tranship.rewards, tranship.rewards.worker_main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
