"""The engine's weights as others write them: fused storages, and the pieces that say what lies where in them."""

from __future__ import annotations

import torch

from tranship.layouts.pieces import Piece, full_box
from tranship.rollout.native.shape import ModelShape

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class Weights:
    """Storages by name, allocated and freed together.

    q, k and v of a layer lie one below the other in one storage, and so do gate and up. Vectors are storages of
    their own. A tied head has no storage: it reads the embedding's.
    """

    def __init__(self, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._pieces: list[Piece] = []
        self._storages: dict[str, torch.Tensor] = {}
        self._plan(shape)
        self.allocate()

    def allocate(self) -> None:
        """Make every storage, with undefined content; others may write to them in any autograd mode."""
        with torch.inference_mode(False):
            self._storages = {
                name: torch.empty(shape, dtype=self._dtype, device=self._device) for name, shape in self._shapes.items()
            }

    def free(self) -> None:
        """Drop every storage."""
        self._storages = {}

    def pieces(self) -> list[Piece]:
        """Where each Hugging Face tensor lies; together they cover every storage once."""
        return list(self._pieces)

    def __getitem__(self, name: str) -> torch.Tensor:
        """The storage called `name`. Calling this for an unknown name or while freed is a bug."""
        assert self._storages, "the weights are freed: wake up first"
        assert name in self._storages, f"there is no storage {name!r}"
        return self._storages[name]

    def get(self, name: str) -> torch.Tensor | None:
        """The storage called `name`, or None if this model has none of that name."""
        return self[name] if name in self._shapes else None

    def _plan(self, shape: ModelShape) -> None:
        q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        hidden, mlp = shape.hidden, shape.mlp
        self._add("embed", {"model.embed_tokens.weight": (shape.vocab, hidden)})
        for index in range(shape.num_layers):
            own, theirs = f"layers.{index}", f"model.layers.{index}"
            attention, feed = f"{theirs}.self_attn", f"{theirs}.mlp"
            heads = {"q_proj": q, "k_proj": kv, "v_proj": kv}
            self._add(f"{own}.attn_norm", {f"{theirs}.input_layernorm.weight": (hidden,)})
            self._add(f"{own}.qkv", {f"{attention}.{n}.weight": (rows, hidden) for n, rows in heads.items()})
            if shape.qkv_bias:
                self._add(f"{own}.qkv_bias", {f"{attention}.{n}.bias": (rows,) for n, rows in heads.items()})
            if shape.qk_norm:
                self._add(f"{own}.q_norm", {f"{attention}.q_norm.weight": (shape.head_dim,)})
                self._add(f"{own}.k_norm", {f"{attention}.k_norm.weight": (shape.head_dim,)})
            self._add(f"{own}.o", {f"{attention}.o_proj.weight": (hidden, q)})
            if shape.o_bias:
                self._add(f"{own}.o_bias", {f"{attention}.o_proj.bias": (hidden,)})
            self._add(f"{own}.mlp_norm", {f"{theirs}.post_attention_layernorm.weight": (hidden,)})
            self._add(f"{own}.gate_up", {f"{feed}.{n}.weight": (mlp, hidden) for n in ("gate_proj", "up_proj")})
            self._add(f"{own}.down", {f"{feed}.down_proj.weight": (hidden, mlp)})
            if shape.mlp_bias:
                self._add(f"{own}.gate_up_bias", {f"{feed}.{n}.bias": (mlp,) for n in ("gate_proj", "up_proj")})
                self._add(f"{own}.down_bias", {f"{feed}.down_proj.bias": (hidden,)})
        self._add("norm", {"model.norm.weight": (hidden,)})
        if not shape.tied:
            self._add("lm_head", {"lm_head.weight": (shape.vocab, hidden)})

    def _add(self, storage: str, tensors: dict[str, tuple[int, ...]]) -> None:
        """One storage that holds `tensors` one below the other."""
        row = 0
        for name, shape in tensors.items():
            box = full_box(shape)
            below = ((row, row + shape[0]), *box[1:])
            self._pieces.append(Piece(name, shape, box, storage, below, DTYPE_NAMES[self._dtype]))
            row += shape[0]
            self._shapes[storage] = (row, *shape[1:])
