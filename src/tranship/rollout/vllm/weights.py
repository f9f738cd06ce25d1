"""Weights on their way into vLLM: a tensor for each one of the Hugging Face folder, there only during an update."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open

from tranship.layouts.pieces import Piece, full_box
from tranship.types import UserError

# What vLLM keeps in fp32, whatever the model's dtype.
_ALWAYS_FP32 = ("e_score_correction_bias",)
_TIED_HEAD = "lm_head.weight"


class StagedWeights:
    """Tensors by Hugging Face name, which others write; vLLM loads from them. Not allocated but during an update.

    tied: the head is the embedding, and no tensor of its own even if the folder has one.
    """

    def __init__(self, model_dir: Path, dtype: torch.dtype, device: torch.device, *, tied: bool) -> None:
        shapes = _folder_shapes(Path(model_dir))
        if tied:
            shapes.pop(_TIED_HEAD, None)
        self._device = device
        self._planned = {
            name: (shape, torch.float32 if name.endswith(_ALWAYS_FP32) else dtype) for name, shape in shapes.items()
        }
        self._tensors: dict[str, torch.Tensor] = {}

    def pieces(self) -> list[Piece]:
        """One whole tensor each."""
        return [
            Piece(name, shape, full_box(shape), name, full_box(shape), str(dtype).removeprefix("torch."))
            for name, (shape, dtype) in self._planned.items()
        ]

    def allocate(self) -> None:
        """Make every tensor, with undefined content."""
        with torch.inference_mode(False):
            self._tensors = {
                name: torch.empty(shape, dtype=dtype, device=self._device)
                for name, (shape, dtype) in self._planned.items()
            }

    def free(self) -> None:
        """Drop every tensor."""
        self._tensors = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor called `name`. Calling this outside an update is a bug."""
        assert self._tensors, "weights can be written between begin_update and finish_update only"
        return self._tensors[name]

    def items(self) -> list[tuple[str, torch.Tensor]]:
        """All names and tensors."""
        return list(self._tensors.items())


def _folder_shapes(model_dir: Path) -> dict[str, tuple[int, ...]]:
    """The tensors of a Hugging Face folder and their shapes, from the headers of its files."""
    index = model_dir / "model.safetensors.index.json"
    if index.is_file():
        files = sorted({model_dir / file for file in json.loads(index.read_text())["weight_map"].values()})
    else:
        files = [model_dir / "model.safetensors"]
    if missing := [file for file in files if not file.is_file()]:
        raise UserError(f"there is no {missing[0].name} in {model_dir}: give a Hugging Face folder with safetensors")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return shapes
