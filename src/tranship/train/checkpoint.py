"""Training state to files and back, bit for bit: safetensors for tensors, JSON for the rest; nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tranship.types import UserError

WEIGHTS, OPTIMIZER, RANDOM, PROGRESS = (
    "weights.safetensors",
    "optimizer.safetensors",
    "random.safetensors",
    "train.json",
)


def write_state(
    folder: Path,
    parameters: Mapping[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    progress: Mapping[str, Any],
) -> None:
    """Write weights, optimizer state, the random states of torch and numpy, and `progress` (JSON values)."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: p.detach().contiguous() for name, p in parameters.items()}, folder / WEIGHTS)
    moments = {
        f"{key}/{name}": value.detach().contiguous()
        for name, p in parameters.items()
        for key, value in optimizer.state.get(p, {}).items()
    }
    save_file(moments, folder / OPTIMIZER)
    random, random_numbers = _random_state()
    save_file(random, folder / RANDOM)
    (folder / PROGRESS).write_text(json.dumps({"progress": dict(progress), "numpy": random_numbers}, indent=1))


def read_state(
    folder: Path, parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Take over what write_state wrote; returns its progress. Raises UserError before anything changes."""
    for name in (WEIGHTS, OPTIMIZER, RANDOM, PROGRESS):
        if not (folder / name).is_file():
            raise UserError(f"{folder} is no training checkpoint: it has no {name}")
    try:
        weights, moments, random = (load_file(folder / name) for name in (WEIGHTS, OPTIMIZER, RANDOM))
        stored = json.loads((folder / PROGRESS).read_text())
    except (SafetensorError, json.JSONDecodeError) as error:
        raise UserError(f"{folder} is damaged: {error}; use an earlier checkpoint") from error
    _check_fit(folder, parameters, weights)
    states: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in moments.items():
        kind, _, name = key.partition("/")
        if name not in parameters:
            raise UserError(f"{folder / OPTIMIZER} has state of {name}, which this model lacks")
        states.setdefault(name, {})[kind] = value
    with torch.no_grad():
        for name, p in parameters.items():
            p.copy_(weights[name])
    optimizer.state.clear()
    for name, state in states.items():
        p = parameters[name]
        optimizer.state[p] = {kind: value.to(p.device) for kind, value in state.items()}
    _set_random_state(random, stored["numpy"])
    return stored["progress"]


def _check_fit(folder: Path, parameters: Mapping[str, torch.nn.Parameter], weights: Mapping[str, torch.Tensor]) -> None:
    missing = sorted(set(parameters) - set(weights))
    extra = sorted(set(weights) - set(parameters))
    if missing or extra:
        raise UserError(f"{folder} is of another model: it lacks {missing[:3]} and has {extra[:3]} besides")
    for name, p in parameters.items():
        stored = weights[name]
        if stored.shape != p.shape or stored.dtype != p.dtype:
            raise UserError(
                f"{folder} is of another model: {name} is {stored.dtype} {tuple(stored.shape)} there "
                f"and {p.dtype} {tuple(p.shape)} here"
            )


def _random_state() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    tensors = {"torch": torch.get_rng_state(), "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64))}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    numbers = {"kind": str(kind), "position": int(position), "has_gauss": int(has_gauss), "gauss": float(gauss)}
    return tensors, numbers


def _set_random_state(tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:
    torch.set_rng_state(tensors["torch"])
    keys = tensors["numpy"].numpy().astype(np.uint32)
    np.random.set_state((numbers["kind"], keys, numbers["position"], numbers["has_gauss"], numbers["gauss"]))
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
