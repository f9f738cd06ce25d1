"""Every tracker of the table: what was logged can be read back, at once, and once, also after a restart."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tranship.lookup import resolve
from tranship.observe.jsonl import read_jsonl
from tranship.observe.trackers import TRACKERS, Tracker, make_tracker
from tranship.types import UserError

# Packages that the project itself does not need.
PACKAGES = {"wandb": ("wandb",), "mlflow": ("mlflow", "sqlalchemy", "alembic"), "trackio": ("trackio",)}
CONFIG = {"train": {"steps": 4, "optimizer": {"learning_rate": 1e-6}}, "model": {"path": "somewhere"}, "names": ["a"]}

Found = dict[str, list[tuple[int, float]]]


def read_back(name: str, run_dir: Path) -> Found:
    """Metric -> (step, value) in the order of the steps, as a user of the tracker would see it: of several values at
    one step of a store that only appends, the last."""
    rows: list[tuple[int, dict[str, Any]]]
    if name == "jsonl":
        rows = [(row.pop("step"), row) for row in read_jsonl(run_dir / "metrics.jsonl")]
        return collect([(step, {k: v for k, v in row.items() if k not in ("kind", "time")}) for step, row in rows])
    if name == "tensorboard":
        events = tensorboard_events(run_dir)
        return {
            metric: [(event.step, event.value) for event in events.Scalars(metric)]
            for metric in events.Tags()["scalars"]
        }
    if name == "mlflow":
        return last_of_step(mlflow_rows(run_dir))
    if name == "wandb":
        rows = [(row.pop("training/global_step"), row) for row in wandb_history(run_dir)]
        return last_of_step(collect(rows))
    assert name == "trackio", f"say here how {name} is read back"
    from trackio.sqlite_storage import SQLiteStorage

    run = f"{run_dir.name}-{(run_dir / 'trackio' / 'run_id').read_text().strip()}"
    rows = [(row.pop("step"), row) for row in SQLiteStorage.get_logs("a project", run)]
    return last_of_step(collect([(step, {k: v for k, v in row.items() if k != "timestamp"}) for step, row in rows]))


def read_when(name: str, run_dir: Path, metric: str, count: int) -> Found:
    """What is read back once the metric has so many points, or after 20 s: W&B writes in a process of its own, the
    end of a run too."""
    limit = time.monotonic() + 20
    while len(read_back(name, run_dir).get(metric, ())) < count and time.monotonic() < limit:
        time.sleep(0.1)
    return read_back(name, run_dir)


def collect(rows: list[tuple[int, dict[str, Any]]]) -> Found:
    found: Found = {}
    for step, row in rows:
        for metric, value in row.items():
            if not metric.startswith("_"):
                found.setdefault(metric, []).append((step, value))
    return found


def last_of_step(found: Found) -> Found:
    return {metric: sorted(dict(points).items()) for metric, points in found.items()}


def tensorboard_events(run_dir: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return events


def mlflow_client(run_dir: Path) -> tuple[Any, str]:
    from mlflow.tracking import MlflowClient

    folder = run_dir / "mlflow"
    return MlflowClient(f"sqlite:///{folder / 'mlflow.db'}"), (folder / "run_id").read_text().strip()


def mlflow_rows(run_dir: Path) -> Found:
    client, run_id = mlflow_client(run_dir)
    metrics = client.get_run(run_id).data.metrics
    return {name: [(m.step, m.value) for m in client.get_metric_history(run_id, name)] for name in metrics}


def wandb_records(run_dir: Path) -> Iterator[Any]:
    """The records of this run's offline files, in the order in which they were opened."""
    from wandb.proto.wandb_internal_pb2 import Record

    run_id = (run_dir / "wandb" / "run_id").read_text().strip()
    for path in sorted(run_dir.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb")):
        for data in leveldb_log(path.read_bytes()[7:]):
            record = Record()
            record.ParseFromString(data)
            yield record


def leveldb_log(data: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log whose 7 bytes of W&B's own were cut off (they count for the blocks of 32 KiB)."""
    block, at, parts = 32768, 0, []
    while at + 7 <= len(data):
        left = block - (at + 7) % block
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # A whole record, or the last piece of one.
            yield b"".join(parts)
            parts = []


def wandb_history(run_dir: Path) -> Iterator[dict[str, Any]]:
    for record in wandb_records(run_dir):
        if record.WhichOneof("record_type") == "history":
            yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}


@pytest.fixture(scope="session")
def mlflow_tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a run of another project; MLflow takes seconds to make its tables."""
    run_dir = tmp_path_factory.mktemp("tables")
    make_tracker("mlflow", run_dir, None, project="another", config={}).close()
    return run_dir / "mlflow" / "mlflow.db"


@pytest.fixture(params=sorted(TRACKERS))
def name(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> str:
    """A tracker whose packages are installed, kept from any network."""
    for package in PACKAGES.get(request.param, ()):
        pytest.importorskip(package)
    shared = str(tmp_path_factory.getbasetemp() / "trackio")
    for variable, value in {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_BASE_URL": "http://127.0.0.1:9",
        "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "2",
        "TRACKIO_DIR": shared,
        "HF_HUB_OFFLINE": "1",
    }.items():
        monkeypatch.setenv(variable, value)
    for variable in ("MLFLOW_TRACKING_URI", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(variable, raising=False)
    if request.param == "mlflow":
        (tmp_path / "mlflow").mkdir()
        shutil.copy(request.getfixturevalue("mlflow_tables"), tmp_path / "mlflow")
    return request.param


def make(name: str, run_dir: Path, resumed_step: int | None, config: dict[str, Any] = CONFIG) -> Tracker:
    return make_tracker(name, run_dir, resumed_step, project="a project", config=config)


def test_what_was_logged_is_read_back_before_close(name: str, tmp_path: Path) -> None:
    tracker = make(name, tmp_path, None)
    tracker.log("before", 0, {"val/score": 0.125})
    tracker.log("step", 1, {"critic/score/mean": 0.5, "groups/num": 8})
    tracker.log("step", 2, {"critic/score/mean": 0.75, "groups/num": 8})
    found = read_when(name, tmp_path, "groups/num", 2)
    tracker.close()
    assert found["val/score"] == [(0, 0.125)]
    assert found["critic/score/mean"] == [(1, 0.5), (2, 0.75)]
    assert found["groups/num"] == [(1, 8), (2, 8)]
    assert read_back(name, tmp_path) == found


def test_a_resumed_run_shows_each_step_once(name: str, tmp_path: Path) -> None:
    tracker = make(name, tmp_path, None)
    for step in (1, 2, 3):
        tracker.log("step", step, {"x": float(step)})
    tracker.close()
    if name == "wandb":
        time.sleep(1.1)  # Its folders are named after the second.
    again = make(name, tmp_path, 2)
    for step in (3, 4):
        again.log("step", step, {"x": 10.0 * step})
    again.close()
    assert read_when(name, tmp_path, "x", 4)["x"] == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]


def test_a_new_run_does_not_show_the_old_one(name: str, tmp_path: Path) -> None:
    tracker = make(name, tmp_path, None)
    tracker.log("step", 1, {"x": 1.0})
    tracker.log("step", 2, {"x": 1.0})
    tracker.close()
    again = make(name, tmp_path, None)
    again.log("step", 1, {"x": 5.0})
    again.close()
    assert read_when(name, tmp_path, "x", 1)["x"] == [(1, 5.0)]


def test_odd_names_and_numbers_that_are_not_finite_stop_nothing(name: str, tmp_path: Path) -> None:
    tracker = make(name, tmp_path, None)
    tracker.log("step", 1, {"x": float("nan"), "y": float("inf"), "z": 1.0, "val-core/a b/reward/mean@4": 0.5})
    tracker.close()
    found = read_when(name, tmp_path, "z", 1)
    assert found["z"] == [(1, 1.0)]
    written = "val-core/a b/reward/mean@4"
    assert found[written.replace("@", "_at_") if name == "mlflow" else written] == [(1, 0.5)]


def test_tensorboard_shows_the_configuration(tmp_path: Path) -> None:
    make("tensorboard", tmp_path, None).close()
    events = tensorboard_events(tmp_path)
    (tag,) = events.Tags()["tensors"]
    (event,) = events.Tensors(tag)
    assert json.loads(event.tensor_proto.string_val[0]) == CONFIG


@pytest.mark.parametrize("name", ["wandb"], indirect=True)
def test_wandb_has_the_configuration_and_one_id(name: str, tmp_path: Path) -> None:
    for step, resumed_step in ((1, None), (2, 1)):
        tracker = make(name, tmp_path, resumed_step)
        tracker.log("step", step, {"x": 1.0})
        tracker.close()
        assert len(read_when(name, tmp_path, "x", step)["x"]) == step
        time.sleep(1.1)  # Its folders are named after the second.
    runs = [record.run for record in wandb_records(tmp_path) if record.WhichOneof("record_type") == "run"]
    assert len(runs) == 2
    assert {run.run_id for run in runs} == {(tmp_path / "wandb" / "run_id").read_text().strip()}
    assert {(run.project, run.display_name) for run in runs} == {("a project", tmp_path.name)}
    for run in runs:
        config = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert {key: config[key] for key in CONFIG} == CONFIG


@pytest.mark.parametrize("name", ["mlflow"], indirect=True)
def test_mlflow_has_the_configuration_and_says_what_a_resumed_run_changed(name: str, tmp_path: Path) -> None:
    many = {f"key{number}": number for number in range(150)}
    make(name, tmp_path, None, CONFIG | many).close()
    changed = CONFIG | many | {"train": {"steps": 9, "optimizer": {"learning_rate": 1e-6}}, "new": None}
    make(name, tmp_path, 0, changed).close()
    client, run_id = mlflow_client(tmp_path)
    run = client.get_run(run_id)
    assert (run.info.run_name, run.info.status) == (tmp_path.name, "FINISHED")
    wanted = {"train.steps": "4", "train.optimizer.learning_rate": "1e-06", "model.path": "somewhere", "new": "null"}
    assert wanted.items() <= run.data.params.items()
    assert run.data.params["names"] == '["a"]'
    assert len(run.data.params) == 155
    assert {key: value for key, value in run.data.tags.items() if key.startswith("resumed.")} == {
        "resumed.train.steps": "9"
    }


@pytest.mark.parametrize("name", ["mlflow"], indirect=True)
def test_a_server_that_does_not_answer_stops_the_run_at_its_start(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"observe\.trackers: mlflow cannot start"):
        make(name, tmp_path, None)


def test_every_entry_resolves_and_an_unknown_one_is_named(tmp_path: Path) -> None:
    for entry in TRACKERS:
        assert callable(resolve(entry, TRACKERS, "observe.trackers"))
    with pytest.raises(UserError, match="observe\\.trackers: 'wandbb' is not known; use one of: jsonl, mlflow, tens"):
        make("wandbb", tmp_path, None)


def test_trackers_need_neither_torch_nor_each_other() -> None:
    modules = ", ".join(f"tranship.observe.{name}_tracker" for name in ("tensorboard", "wandb", "mlflow", "trackio"))
    program = (
        f"import sys, {modules}; found = {{'torch', 'wandb', 'mlflow', 'trackio'}} & sys.modules.keys();"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
