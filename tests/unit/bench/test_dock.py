"""The dock's benchmark in small: what it moves is checked, what it counts is right, what is not there is said."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from tranship.bench import dock as bench
from tranship.bench.dock_control import samples_per_s, take_seconds
from tranship.bench.dock_ours import Ours
from tranship.bench.dock_pipe import Process
from tranship.bench.dock_storm import Outcome, Storm
from tranship.bench.dock_wide import KINDS, make
from tranship.bench.dock_work import COLUMNS, Setting, check, nbytes_of, rows, span
from tranship.types import RunError, UserError

TINY = Setting(1, 1, 16, 64)


def test_rows_are_as_the_workload_says_and_always_the_same():
    made = rows(range(50), 256)
    assert tuple(made) == COLUMNS
    for number in range(50):
        assert 8 <= len(made["prompt"][number]) <= 32
        assert 64 <= len(made["response"][number]) <= 256
        lengths = {len(made[name][number]) for name in ("response", "logprobs", "ref_logprobs", "advantages")}
        assert len(lengths) == 1
    assert made["prompt"][0].dtype == made["response"][0].dtype == np.int32
    check(list(range(50)), rows(range(50), 256), 256)
    assert nbytes_of(made) == sum(4 * len(made["prompt"][i]) + 16 * len(made["response"][i]) + 4 for i in range(50))


@pytest.mark.parametrize("column", COLUMNS)
def test_the_check_finds_what_is_wrong(column):
    made = rows(range(3), 64)
    value = np.array(made[column][1], copy=True).reshape(-1)
    value[-1] += 1
    made[column][1] = value
    with pytest.raises(AssertionError, match=f"row 1: {column}"):
        check([0, 1, 2], made, 64)
    with pytest.raises(AssertionError, match="values for 2 rows"):
        check([0, 2], made, 64)


def test_a_round_is_from_the_first_start_to_the_last_end():
    assert span([(1.0, 3.0), (0.5, 2.0), (2.0, 2.5)]) == 2.5


def test_rows_are_shared_out_without_rest():
    setting = Setting(4, 4, 1024, 64)
    assert [n for i in range(4) for n in setting.share(i)] == list(range(1024))
    assert setting.name == "4x4"


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    side = Ours(tmp_path_factory.mktemp("ours"))
    yield side
    side.end()


@pytest.mark.parametrize("remote", [False, True], ids=["here", "remote"])
def test_our_side_moves_the_workload(ours, remote):
    for setting in (TINY, Setting(2, 2, 32, 64)):
        done = ours.round(setting, 2, remote=remote, how="check", packed=remote)
        assert len(done["put_s"]) == len(done["get_s"]) == 2
        assert min(done["put_s"] + done["get_s"]) > 0
        assert done["nbytes"] == nbytes_of(rows(range(setting.batch), setting.longest))


def test_our_side_moves_views_single_samples_and_wide_columns(ours):
    assert min(ours.round(TINY, 1, how="view")["get_s"]) > 0
    seconds = ours.one_by_one(5, 64)
    assert len(seconds["put_s"]) == len(seconds["get_s"]) == 5
    for kind in KINDS:
        wide = ours.wide(kind, rows=8, tokens=16, repeats=1)
        assert wide["nbytes"] == nbytes_of(make(kind, 8, 16))
        assert min(wide["put_s"] + wide["get_s"]) > 0
    assert len(ours.copies(1000, 3)) == 3


def test_the_metadata_plane_is_timed():
    assert min(samples_per_s(2)) > 1000
    assert len(take_seconds(1 << 10, 5)) == 5
    assert len(take_seconds(1 << 10, 5, "balanced")) == 5


def test_a_process_that_fails_is_quoted(tmp_path):
    process = Process(["python3", "-c", "import sys; sys.exit('so it ends')"], tmp_path / "log")
    with pytest.raises(RunError, match="so it ends"):
        process.hear(20.0)


def test_what_was_lost_and_counted_twice_is_counted():
    outcome = Outcome(admitted=5, seen=Counter({0: 1, 1: 2, 2: 1}), wrong=1)
    assert outcome.rows_lost == 2 * 4 + 1
    assert outcome.rows_counted_twice == 4


def test_a_storm_in_small(tmp_path):
    outcome = Storm(tmp_path, seed=1).run(1.0)
    assert outcome.rows_lost == outcome.rows_counted_twice == 0
    assert outcome.admitted > 0
    assert Storm(tmp_path, seed=1).recover(stop=False) < 2.0


def test_the_whole_benchmark_in_small(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "_SETTINGS", {"1x1": TINY, "small": TINY, "4x4": TINY, "8x8": TINY})
    monkeypatch.setattr(bench, "_ONE_SAMPLES", 3)
    monkeypatch.setattr(bench, "peer_python", lambda: tmp_path / "no" / "python")
    file = tmp_path / "figures.json"
    assert bench.main(True, file, workloads="1x1,one", sides="ours,transferqueue", rounds=2) == 0
    figures = json.loads(file.read_text())
    for name in ("put_vs_memcpy", "get_vs_memcpy", "view_vs_memcpy", "one_sample_put_ms", "one_sample_get_ms"):
        assert figures[name] > 0
    assert figures["vs_transferqueue_1x1"] is None
    assert figures["not_measured"]["rows_lost"] == "left out"
    assert set(figures) >= set(bench.BARS) | {"machine", "versions", "repeats"}
    assert any("TransferQueue was not measured" in note for note in figures["notes"])
    assert "1x1:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "words"),
    [({"workloads": "9x9"}, "no '9x9'"), ({"sides": "verl"}, "no 'verl'"), ({"sides": "central"}, "must have ours")],
)
def test_what_is_not_known_is_refused(given, words):
    with pytest.raises(UserError, match=words):
        bench.main(True, None, **given)
