"""Foreign code: right answers count, and nothing that it does reaches further than its own process."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tranship.rewards import RewardPool, RewardRequest, Term
from tranship.rewards.calls import load
from tranship.rewards.run_code import RunCode, last_code, parse_tests
from tranship.types import UserError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="uses the limits of Linux")

ADD = "def add(a, b):\n    return a + b"
PASSES = ["assert True"]


# CLONE_NEWNS, NEWIPC, NEWPID, NEWNET, and NEWUSER where the process is not root.
NAMESPACES = 0x00020000 | 0x08000000 | 0x20000000 | 0x40000000 | (0 if os.geteuid() == 0 else 0x10000000)


@pytest.fixture(scope="module")
def isolated() -> RunCode:
    probe = f"import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare({NAMESPACES}) != 0)"
    if subprocess.run([sys.executable, "-c", probe]).returncode:
        pytest.skip("this system does not let a process make namespaces of its own")
    return RunCode(test_timeout_s=2.0, memory_mb=300)


@pytest.fixture(scope="module")
def unisolated() -> RunCode:
    """As where namespaces are not allowed: the limits of processes alone."""
    made = RunCode(test_timeout_s=2.0, memory_mb=300, allow_network=True)
    made._job["isolate"] = False
    return made


@pytest.fixture(params=["isolated", "unisolated"])
def runner(request: pytest.FixtureRequest) -> RunCode:
    return request.getfixturevalue(request.param)


def run(runner: RunCode, code: str, tests: Any = PASSES) -> dict[str, float]:
    return runner("s", f"So:\n```python\n{code}\n```\n", tests)


def passes(runner: RunCode, code: str, output: str = "") -> bool:
    """Whether the code, as a program, ends by itself and prints this."""
    return run(runner, code, [{"input": "", "output": output}])["score"] == 1


@pytest.mark.parametrize(
    ("code", "tests", "score"),
    [
        (ADD, ["assert add(1, 2) == 3"], 1),
        (ADD, ["assert add(1, 2) == 3", "assert add(1, 2) == 4"], 0.5),
        (ADD, '["assert add(1, 2) == 3"]', 1),
        (ADD, "assert add(1, 2) == 3", 1),
        ("a, b = map(int, input().split())\nprint(a + b, '')", [{"input": "1 2\n", "output": "3\n\n"}], 1),
        ("print(int(input()) * 2)", {"inputs": ["1", "2", "x"], "outputs": ["2", "5", ""]}, 1 / 3),
        ("import sys\nprint(sys.stdin.read().upper())\nsys.exit()", [{"input": "a\nb", "output": "A\nB"}], 1),
        ("if __name__ == '__main__':\n    print(1)", [{"input": "", "output": "1"}], 1),
        ("if __name__ == '__main__':\n    raise ValueError", PASSES, 1),
        ("print('é', '\\ud800'.encode('utf-8', 'replace'))", [{"input": "", "output": "é b'?'"}], 1),
        ("import threading\nt = threading.Thread(target=print, args=[7])\nt.start()\nt.join()",
         [{"input": "", "output": "7"}], 1),
        ("def add(:", ["assert True"], 0),
        ("print(1)\nraise ValueError", [{"input": "", "output": "1"}], 0),
        ("print(1)\nimport sys\nsys.exit(2)", [{"input": "", "output": "1"}], 0),
    ],
)  # fmt: skip
def test_programs_and_functions(isolated: RunCode, code: str, tests: Any, score: float):
    result = run(isolated, code, tests)
    assert result["score"] == result["passed"] == pytest.approx(score)
    assert (result["well_formed"], result["timeouts"]) == (1, 0)


def test_all_or_nothing_ends_with_the_first_failure():
    runner = RunCode(partial=False)
    assert run(runner, ADD, ["assert add(1, 2) == 3", "assert add(2, 2) == 4"])["score"] == 1
    assert run(runner, ADD, ["assert add(1, 2) == 3", "assert add(1, 2) == 4"])["score"] == 0


@pytest.mark.parametrize(
    "code",
    ["import os\nos._exit(0)", "import sys\nsys.exit(0)", "raise SystemExit", "import os\nos.write(3, b'x' * 99)",
     "import os\nos.close(3)\nos._exit(0)", "import os\nos.kill(os.getpid(), 9)"],
)  # fmt: skip
def test_ending_early_passes_no_test(runner: RunCode, code: str):
    assert run(runner, code, ["assert False"])["score"] == 0


def test_an_endless_loop_is_stopped(runner: RunCode):
    started = time.monotonic()
    result = run(runner, "while True:\n    pass")
    assert (result["score"], result["timeouts"]) == (0, 1)
    assert time.monotonic() - started < 6


def test_a_stop_that_is_ignored_is_none(isolated: RunCode):
    code = (
        "import signal, time\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n"
        "    except Exception: pass\nwhile True:\n    time.sleep(1)"
    )
    assert run(isolated, code)["timeouts"] == 1


def test_memory_is_bounded(runner: RunCode):
    code = (
        "held = []\ntry:\n    while True:\n        held.append(bytearray(1 << 24))\n"
        "except MemoryError:\n    print(len(held) < 20)"
    )
    assert passes(runner, code, "True")


def test_files_are_bounded(runner: RunCode):
    code = (
        "try:\n    with open('big', 'wb') as file:\n        while True:\n            file.write(bytes(1 << 20))\n"
        "except OSError as error:\n    import os\n    print(error.errno in (27, 28), os.stat('big').st_size <= 4 << 20)"
    )
    assert passes(runner, code, "True True")


def test_files_together_and_output_are_bounded(isolated: RunCode):
    code = (
        "total = 0\ntry:\n    for n in range(100):\n        with open(str(n), 'wb') as file:\n"
        "            total += file.write(bytes(1 << 21))\n"
        "except OSError as error:\n    print(error.errno, total <= 16 << 20)"
    )
    assert passes(isolated, code, "28 True")
    assert not passes(isolated, "while True:\n    print('x' * 1000)")


def test_processes_are_bounded_and_none_is_left(runner: RunCode):
    code = (
        "import os, time\ncount = 0\ntry:\n    while True:\n        if os.fork() == 0:\n            os.setsid()\n"
        "            time.sleep(987654)\n        count += 1\n"
        "except OSError as error:\n    print(error.errno, count <= 18)"
    )
    assert passes(runner, code, "11 True")
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and _is_foreign(pid)]


def _is_foreign(pid: str) -> bool:
    try:
        return b"sandbox.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def test_a_fork_bomb_ends_with_its_test(isolated: RunCode):
    started = time.monotonic()
    run(isolated, "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass")
    assert time.monotonic() - started < 8
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and _is_foreign(pid)]


def test_there_is_no_network(isolated: RunCode):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)\nprint('in')"
        assert not passes(isolated, code, "in")
        with pytest.raises(TimeoutError):
            server.accept()
    datagram = "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))"
    assert not passes(isolated, f"import socket\n{datagram}\nprint(1)", "1")


def test_network_where_it_is_allowed():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)\nprint('in')"
        assert passes(RunCode(allow_network=True), code, "in")


def test_other_processes_are_out_of_reach(isolated: RunCode):
    code = (
        "import os, signal\nprint(os.getppid(), os.getpid(), sorted(p for p in os.listdir('/proc') if p.isdigit()) in"
        f" ([], ['1']))\ntry:\n    os.kill({os.getpid()}, signal.SIGKILL)\n"
        "except ProcessLookupError:\n    print('none')"
    )
    assert passes(isolated, code, "0 1 True\nnone")
    for target in ("os.getppid()", "0", "-1"):
        run(isolated, f"import os\nos.kill({target}, 9)")


@pytest.mark.parametrize("isolate", [True, False])
def test_killing_its_parent_costs_its_own_sample_alone(isolate: bool, tmp_path: Path):
    kind = tmp_path / "kind.py"
    kind.write_text(
        "from tranship.rewards.run_code import RunCode\n"
        "class Kind(RunCode):\n    def __init__(self):\n"
        f"        super().__init__(allow_network=True)\n        self._job['isolate'] = {isolate}\n"
    )
    with RewardPool([Term("kind", f"{kind}:Kind")], 1, 10.0) as pool:
        bad = RewardRequest("s", "```python\nimport os\nos.kill(os.getppid(), 9)\n```", ["assert False"])
        good = RewardRequest("s", f"```python\n{ADD}\n```", ["assert add(1, 1) == 2"])
        first, second = pool.score_all([bad, good])
    assert first.value == 0 or "ended with code -9" in first.reason
    assert second.value == 1


def test_neither_environment_nor_files_of_this_process_are_inherited(runner: RunCode, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET_TOKEN", "abc")
    with open(os.devnull) as held:
        os.set_inheritable(held.fileno(), True)
        code = (
            "import os\nprint('SECRET_TOKEN' in os.environ, os.listdir('.'))\n"
            f"try:\n    os.fstat({max(held.fileno(), 4)})\nexcept OSError:\n    print('closed')"
        )
        assert passes(runner, code, "False []\nclosed")


def test_files_outside_its_folder_are_read_only(isolated: RunCode, tmp_path: Path):
    tmp_path.chmod(0o777)
    places = [str(tmp_path / "x"), "/tmp/x", "/var/tmp/x", os.path.expanduser("~/x"), "/dev/shm/../x"]
    code = (
        f"for place in {places!r}:\n    try:\n        open(place, 'w')\n        print('written', place)\n"
        "    except OSError:\n        pass\n"
        "open('mine', 'w').write('x')\nimport tempfile\ntempfile.TemporaryFile().close()"
    )
    assert passes(isolated, code)
    assert list(tmp_path.iterdir()) == []


def test_it_has_no_rights_over_its_own_namespaces(isolated: RunCode):
    code = (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\nhere = os.getcwd().encode()\n"
        "status = dict(line.split(':', 1) for line in open('/proc/self/status'))\n"
        "print(int(status['CapEff'], 16) & ~4, libc.umount2(here, 2), libc.unshare(0x00020000),"
        " libc.mount(None, b'/', None, 4128, None), libc.mount(b'x', here, b'tmpfs', 0, None), os.listdir('/run'))"
    )
    assert passes(isolated, code, "0 -1 -1 -1 -1 []")


def test_a_run_that_is_slow_only_by_its_number_of_tests_is_invalid():
    runner = RunCode(test_timeout_s=0.9, timeout_s=1.0)
    with pytest.raises(TimeoutError, match="of 9 tests ran in 1 s: give fewer, or raise timeout_s"):
        run(runner, "import time\ntime.sleep(0.4)", ["assert True"] * 9)
    slow = RunCode(test_timeout_s=0.6, timeout_s=1.0)
    assert run(slow, "while True: pass", ["assert True"] * 9)["score"] == 0


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na\n```", "a\n"),
        ("```python\na\n```\nor\n```py\nb\n```", "b\n"),
        ("```\na\n```", "a\n"),
        ("```python\na\n```\noutput:\n```\n7\n```", "a\n"),
        ("```json\n{}\n```", None),
        ("~~~python\n```\n~~~", "```\n"),
        ("````python\na\n```\nb\n````", "a\n```\nb\n"),
        ("```python\nnever closed", None),
        ("``` python\na\n```", "a\n"),
        ("```python\r\na\r\n```", "a\r\n"),
        ("```python\n```", ""),
        ("", None),
        ("import os", None),
    ],
)
def test_the_last_block_of_python_is_the_answer(text: str, code: str | None):
    assert last_code(text) == code


@pytest.mark.parametrize("truth", [None, 3, [], {}, "[]", {"inputs": ["1"]}, [3], [{"input": 1, "output": "1"}]])
def test_what_holds_no_tests_is_said(truth: Any):
    with pytest.raises(ValueError, match=r"holds no tests|neither code nor"):
        parse_tests(truth)
    with pytest.raises(ValueError, match="1 inputs and 2 outputs"):
        parse_tests({"inputs": ["1"], "outputs": ["1", "2"]})


def test_without_a_block_there_is_no_score_but_zero(isolated: RunCode):
    assert isolated("s", "no code", PASSES) == {"score": 0, "well_formed": 0, "passed": 0, "timeouts": 0}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"timeout_s": 0}, "timeout_s 0 must be above 0"),
        ({"timeout_s": 3}, "test_timeout_s 3.0 must be below timeout_s 3"),
        ({"memory": 3}, "'memory'"),
    ],
)
def test_arguments_are_checked_at_the_start(args: dict, message: str):
    with pytest.raises(UserError, match=message):
        load("run_code", args)


def test_a_machine_without_namespaces_is_refused_or_asked_for(monkeypatch: pytest.MonkeyPatch):
    ask = RunCode._ask

    def without(self: RunCode, *args: Any) -> dict[str, Any]:
        return {"error": "[Errno 1] unshare: no"} if self._job["isolate"] else ask(self, *args)

    monkeypatch.setattr(RunCode, "_ask", without)
    with pytest.raises(UserError, match=r"cannot be isolated .*unshare: no.*allow_network: true"):
        load("run_code", {})
    assert run(RunCode(allow_network=True), ADD, ["assert add(1, 2) == 3"])["score"] == 1


@given(st.text(alphabet="ab `~\n#", max_size=40), st.text(alphabet="xy `~\n", max_size=40))
def test_code_in_a_fence_longer_than_its_own_comes_back(code: str, before: str):
    fence = "`" * 50
    text = f"{fence}text\n{before}\n{fence}\n{fence}python\n{code}\n{fence}\nafter"
    assert last_code(text) == code + "\n"
