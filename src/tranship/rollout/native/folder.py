"""Filling an engine from the safetensors files of a Hugging Face folder, through the engine's own pieces."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open

from tranship.rollout.engine import RolloutEngine
from tranship.types import UserError


@torch.no_grad()
def load_folder(engine: RolloutEngine, model_dir: Path, policy_version: int) -> None:
    """Update the engine with the weights in `model_dir`, converted to its dtype, as `policy_version`.

    Raises UserError for a tensor that is missing or has another shape; the engine then stays in the update.
    """
    where = _tensor_files(Path(model_dir))
    engine.begin_update()
    for piece in engine.pieces():
        if piece.name not in where:
            raise UserError(f"{model_dir} has no tensor {piece.name}: is it the folder of this model?")
        with safe_open(where[piece.name], framework="pt") as file:
            tensor = file.get_tensor(piece.name)
        if tuple(tensor.shape) != piece.shape:
            raise UserError(f"{piece.name} of {model_dir} has shape {list(tensor.shape)}, not {list(piece.shape)}")
        source = tuple(slice(*bounds) for bounds in piece.box)
        target = tuple(slice(*bounds) for bounds in piece.storage_box)
        engine.storage(piece.storage)[target].copy_(tensor[source])
    engine.finish_update(policy_version)


def _tensor_files(model_dir: Path) -> dict[str, Path]:
    index = model_dir / "model.safetensors.index.json"
    if index.is_file():
        return {name: model_dir / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    single = model_dir / "model.safetensors"
    if not single.is_file():
        raise UserError(f"there is no model.safetensors in {model_dir}: give a Hugging Face folder with weights")
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)
