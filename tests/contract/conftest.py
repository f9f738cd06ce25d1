"""Engines of the rollout table, each on two tiny models of one shape."""

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests.contract.rank_host import RankHost, lead
from tests.contract.rollout_lab import save_model, update
from tranship.lookup import resolve
from tranship.rollout import ROLLOUT_ENGINES


@pytest.fixture(scope="session")
def rollout_folders(tmp_path_factory):
    return [save_model(tmp_path_factory.mktemp("model"), seed) for seed in range(2)]


@pytest.fixture
def run_on_small_tmpfs():
    """Runs a command where a folder is a small file system in memory: (folder, megabytes, command) -> what it did.

    Skips the test where the system allows none; that is found out apart, so that the command's own failure fails.
    """

    def run(folder, megabytes, command):
        if shutil.which("unshare") is None:
            pytest.skip("unshare is not installed: the test cannot have a small file system of its own")
        mount = f'mount -t tmpfs -o size={megabytes}m tmpfs "$1"'
        inside = ["unshare", "-Urm", "sh", "-c"]
        options = {"capture_output": True, "text": True, "timeout": 60, "cwd": Path(__file__).parents[2]}
        probe = subprocess.run([*inside, mount, "sh", str(folder)], **options)
        if probe.returncode:
            said = probe.stderr.strip()[-200:]
            pytest.skip(f"this system does not let a test mount a file system of its own: {said}")
        words = ["sh", str(folder), *map(str, command)]
        return subprocess.run([*inside, f'{mount} && shift && exec "$@"', *words], **options)

    return run


# What an engine's tests need beside the settings that all engines have.
OWN_SETTINGS = {"vllm": {"compiled": False}}


def engine_or_skip(name):
    """The engine class called `name`; skips the test where the library behind it is not installed."""
    if name == "vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: docs/rollout.md says how to test with it")
    return resolve(name, ROLLOUT_ENGINES, "rollout.engine")


@pytest.fixture(scope="session")
def rank_host():
    """A process for the ranks of engines that have more than one."""
    with RankHost() as host:
        yield host


TWO_RANKS = "native on two ranks"


@pytest.fixture(params=[*sorted(ROLLOUT_ENGINES), TWO_RANKS])
def make_rollout(request, rollout_folders, rank_host):
    """Makes an engine of the table, or one of several processes, with the first folder's weights as `version` (-1:
    without)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    split = request.param == TWO_RANKS
    cls, own = (None, {}) if split else (engine_or_skip(request.param), OWN_SETTINGS.get(request.param, {}))
    led = []

    def build(version=0, **settings):
        defaults = {
            "dtype": "fp32",
            "device": "cpu",
            "max_running": 4,
            "max_tokens": 120,
            "on_update": "recompute",
            "deterministic": False,
            "eos_token_ids": (1,),
        }
        settings = defaults | own | settings
        if split:
            engine = lead(rank_host, rollout_folders[0], 2, settings)
            led.append(engine)
        else:
            engine = cls(rollout_folders[0], **settings)
        if version >= 0:
            update(engine, rollout_folders[0], version)
        return engine

    yield build
    for engine in led:
        engine.close()
    torch.set_num_threads(before)
