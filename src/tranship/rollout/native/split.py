"""The part of a model that one of several ranks holds."""

from __future__ import annotations

from dataclasses import replace

from tranship.layouts import Share
from tranship.rollout.native.shape import ModelShape
from tranship.types import UserError


def split_shape(shape: ModelShape, share: Share) -> ModelShape:
    """The shape of one rank's part: its heads, and its columns of every mlp and every expert.

    The hidden state, the vocabulary and a latent are whole on every rank, and so is a key head where there are fewer of
    them than ranks. Raises UserError where the ranks would not hold equal parts.
    """
    if share.size == 1:
        return shape
    faults = _faults(shape, share)
    if faults:
        possible = [size for size in range(1, shape.num_heads + 1) if not _faults(shape, Share(0, size))]
        raise UserError(
            f"rollout.tensor_parallel {share.size} does not divide the model's {' and '.join(faults)}: use one of "
            f"{', '.join(map(str, possible))}"
        )
    experts = shape.experts
    if experts is not None:
        experts = replace(experts, mlp=experts.mlp // share.size, shared_mlp=experts.shared_mlp // share.size)
    return replace(
        shape,
        num_heads=shape.num_heads // share.size,
        num_kv_heads=shape.num_kv_heads if shape.latent else max(1, shape.num_kv_heads // share.size),
        mlp=shape.mlp // share.size,
        experts=experts,
    )


def _faults(shape: ModelShape, share: Share) -> list[str]:
    """What of a model cannot be given out in equal parts, in words."""
    counts = [(f"{shape.num_heads} attention heads", shape.num_heads)]
    if shape.experts is None or len(shape.expert_layers) < shape.num_layers:
        counts.append((f"intermediate size of {shape.mlp}", shape.mlp))
    if shape.experts is not None:
        counts.append((f"experts' width of {shape.experts.mlp}", shape.experts.mlp))
        counts.append((f"shared experts' width of {shape.experts.shared_mlp}", shape.experts.shared_mlp))
    faults = [said for said, count in counts if count % share.size]
    if not shape.latent and not share.divides(shape.num_kv_heads):
        faults.append(f"{shape.num_kv_heads} key heads")
    return faults
