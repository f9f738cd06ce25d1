"""A version goes from a hosted trainer to hosted samplers, in one process and across processes."""

from pathlib import Path

import pytest

from tranship.runtime import RUNTIMES, RuntimeOptions, start_runtime
from tranship.types import RunError

HOSTED = Path(__file__).with_name("hosted_ends.py")


@pytest.fixture(params=sorted(RUNTIMES), scope="module")
def runtime(request):
    with start_runtime(request.param, RuntimeOptions(num_cores=2, object_store_bytes=200 << 20)) as running:
        yield running


def test_samplers_take_versions_when_they_are_ready_for_them(runtime):
    trainer = runtime.start("trainer", f"{HOSTED}:Trainer", {}, kind="loop", num_threads=1)
    samplers = [runtime.start(f"s{i}", f"{HOSTED}:Sampler", {}, kind="loop", num_threads=1) for i in range(2)]
    announcements = []
    for version in (1, 2, 3):
        trainer.call("train", timeout_s=60)
        announcements.append(trainer.call("publish", version, timeout_s=60))
        assert samplers[0].call("pull", announcements[-1], timeout_s=60) == version
        assert samplers[0].call("total", timeout_s=60) == trainer.call("total", timeout_s=60)
    assert samplers[1].call("pull", announcements[2], timeout_s=60) == 3
    assert samplers[1].call("total", timeout_s=60) == trainer.call("total", timeout_s=60)
    broken = trainer.call("damage", announcements[2], timeout_s=60)
    with pytest.raises(RunError, match="version 3, bucket 1 arrived damaged"):
        samplers[0].call("pull", broken, timeout_s=60)
    for handle in (trainer, *samplers):
        handle.stop()
