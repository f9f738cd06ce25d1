"""What a user may mean by a model: a folder, a name, a run's folder, or one of its checkpoints."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import xxhash

from tranship.models.folder import locate
from tranship.trainer.checkpoint import read_latest
from tranship.types import UserError

_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class TrainedModel:
    """folder: a Hugging Face folder. run_dir: the run that left it; None where it comes from no run of ours.
    policy_version: the batches that it was trained on by that run; 0 where nothing says so."""

    folder: Path
    run_dir: Path | None = None
    policy_version: int = 0


def find_model(argument: str) -> TrainedModel:
    """The folder of the model: RUN/model, else the model of RUN's newest checkpoint, for a run's folder; its model/ for
    a checkpoint; otherwise as model.path. Raises UserError where there is no model."""
    path = Path(argument).expanduser()
    if not path.is_dir() or (path / "config.json").is_file():
        folder = locate(argument)
        return _model(folder, _run_of(folder))
    if (path / "state.json").is_file():
        if not (path / "model" / "config.json").is_file():
            raise UserError(f"the checkpoint {path} has no model in it: use another one of the run, or RUN/model")
        return _model(path / "model", _run_of(path.parent))
    if not (path / "config.yaml").is_file() and not (path / "checkpoints").is_dir():
        raise UserError(
            f"{path} holds neither a model (config.json), nor a run (config.yaml), nor a checkpoint (state.json): give "
            "one of them, or a model's name"
        )
    if (path / "model" / "config.json").is_file():
        return _model(path / "model", path)
    cut = read_latest(path)
    if cut is None:
        raise UserError(f"the run {path} has left no model yet (no {path / 'model'}, no checkpoint): wait for one")
    return _model(cut.folder / "model", path)


def weights_digest(folder: Path) -> str:
    """xxh3-128 of the names and bytes of a folder's safetensors files, in order of their names."""
    digest = xxhash.xxh3_128()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def _model(folder: Path, run_dir: Path | None) -> TrainedModel:
    return TrainedModel(folder, run_dir, 0 if run_dir is None else _version(folder))


def _version(folder: Path) -> int:
    """The policy version of a checkpoint, of RUN/best, or of RUN/model, which is there once its run has completed."""
    parent = folder.resolve().parent
    for file, key in (
        (folder / "best.json", "step"),
        (parent / "state.json", "version"),
        (parent / "summary.json", "steps"),
    ):
        if file.is_file():
            value = json.loads(file.read_text()).get(key)
            return value if isinstance(value, int) else 0
    return 0


def _run_of(folder: Path) -> Path | None:
    """The run that a folder such as RUN/model, RUN/best, RUN/checkpoints or a checkpoint's model belongs to."""
    parent = folder.resolve().parent
    if (parent / "state.json").is_file():
        parent = parent.parent.parent
    return parent if (parent / "config.yaml").is_file() else None
