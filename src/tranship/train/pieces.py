"""Where a transformers model's weights lie, by the names that its Hugging Face folder has for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from tranship.layouts.pieces import Box, Piece, full_box

# In memory the experts of a layer are stacked [E, rows, columns], gate above up; a folder has one tensor for each.
_STACKED = {".experts.gate_up_proj": ("gate_proj", "up_proj"), ".experts.down_proj": ("down_proj",)}
# A router's correction is no parameter: nothing trains it, and a sampler needs it all the same.
_BUFFERS = ("e_score_correction_bias",)


def routing_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that belong to the weights, by name."""
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith(_BUFFERS)}


def model_pieces(storages: Mapping[str, torch.Tensor]) -> list[Piece]:
    """One piece per tensor of the folder, in the storage that holds it; a tied head is not a second one."""
    return [piece for name, tensor in storages.items() for piece in _of_storage(name, tensor)]


def _of_storage(name: str, tensor: torch.Tensor) -> Iterator[Piece]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    ending = next((ending for ending in _STACKED if name.endswith(ending)), None)
    if ending is None:
        shape = tuple(tensor.shape)
        yield Piece(name, shape, full_box(shape), name, full_box(shape), dtype)
        return
    stem, parts = name.rpartition(".")[0], _STACKED[ending]
    rows, columns = tensor.shape[1] // len(parts), tensor.shape[2]
    for expert in range(tensor.shape[0]):
        for place, part in enumerate(parts):
            inside: Box = ((expert, expert + 1), (place * rows, (place + 1) * rows), (0, columns))
            shape = (rows, columns)
            yield Piece(f"{stem}.{expert}.{part}.weight", shape, full_box(shape), name, inside, dtype)
