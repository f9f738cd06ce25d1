"""The engine's weights as others write them: fused storages, and the pieces that say what lies where in them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tranship.layouts import Box, Piece, Share, cut, full_box, scaled
from tranship.rollout.native.shape import ExpertShape, LatentShape, ModelShape

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

Part = tuple[tuple[int, ...], Box]
"""The shape of a whole tensor, and the box of it that lies here."""


class Weights:
    """Storages by name, allocated and freed together.

    q, k and v of a layer lie one below the other in one storage, and so do gate and up; the experts of a layer are
    stacked. Vectors are storages of their own. A tied head has no storage: it reads the embedding's.

    shape: of the whole model. share: what of it lies here. Of several ranks each has rows of what projects to heads, to
    gates and to the vocabulary, and the matching columns of what projects back; all else is whole on every rank.
    """

    def __init__(self, shape: ModelShape, dtype: torch.dtype, device: torch.device, share: Share | None = None) -> None:
        self._dtype = dtype
        self._device = device
        self._share = share or Share()
        self._planned: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._pieces: list[Piece] = []
        self._storages: dict[str, torch.Tensor] = {}
        self._plan(shape)
        self.allocate()

    def allocate(self) -> None:
        """Make every storage, with undefined content; others may write to them in any autograd mode."""
        with torch.inference_mode(False):
            self._storages = {
                name: torch.empty(shape, dtype=dtype, device=self._device)
                for name, (shape, dtype) in self._planned.items()
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
        return self[name] if name in self._planned else None

    def _plan(self, shape: ModelShape) -> None:
        hidden = shape.hidden
        self._add("embed", {"model.embed_tokens.weight": _whole(shape.vocab, hidden)})
        for index in range(shape.num_layers):
            own, theirs = f"layers.{index}", f"model.layers.{index}"
            self._add(f"{own}.attn_norm", {f"{theirs}.input_layernorm.weight": _whole(hidden)})
            if shape.latent is None:
                self._plan_heads(shape, own, f"{theirs}.self_attn")
            else:
                self._plan_latent(shape, shape.latent, own, f"{theirs}.self_attn")
            self._add(f"{own}.mlp_norm", {f"{theirs}.post_attention_layernorm.weight": _whole(hidden)})
            if shape.experts is not None and index in shape.expert_layers:
                self._plan_experts(shape, shape.experts, own, f"{theirs}.mlp")
            else:
                self._plan_mlp(shape, shape.mlp, f"{own}.", f"{theirs}.mlp")
        self._add("norm", {"model.norm.weight": _whole(hidden)})
        if not shape.tied:
            head = (shape.vocab, hidden)
            self._add("lm_head", {"lm_head.weight": (head, cut(head, 0, self._share.stretch(shape.vocab)))})

    def _rows(self, things: int, width: int, *others: int) -> Part:
        """Of a tensor [things x width, *others] the rows of this rank's things."""
        shape = (things * width, *others)
        return shape, cut(shape, 0, scaled(self._share.part(things), width))

    def _columns(self, rows: int, things: int, width: int) -> Part:
        """Of a tensor [rows, things x width] the columns of this rank's things."""
        shape = (rows, things * width)
        return shape, cut(shape, 1, scaled(self._share.part(things), width))

    def _plan_heads(self, shape: ModelShape, own: str, theirs: str) -> None:
        heads = {"q_proj": shape.num_heads, "k_proj": shape.num_kv_heads, "v_proj": shape.num_kv_heads}
        dim = shape.head_dim
        weights = {f"{theirs}.{n}.weight": self._rows(count, dim, shape.hidden) for n, count in heads.items()}
        self._add(f"{own}.qkv", weights)
        if shape.qkv_bias:
            self._add(f"{own}.qkv_bias", {f"{theirs}.{n}.bias": self._rows(count, dim) for n, count in heads.items()})
        if shape.qk_norm:
            self._add(f"{own}.q_norm", {f"{theirs}.q_norm.weight": _whole(dim)})
            self._add(f"{own}.k_norm", {f"{theirs}.k_norm.weight": _whole(dim)})
        self._plan_output(shape, dim, own, theirs)

    def _plan_latent(self, shape: ModelShape, latent: LatentShape, own: str, theirs: str) -> None:
        """What reads the hidden state lies in `down`: the queries (or their latent), then the latent and rotary key."""
        heads, query, hidden = shape.num_heads, latent.nope_dim + latent.rope_dim, shape.hidden
        down = {"kv_a_proj_with_mqa": _whole(latent.kv_rank + latent.rope_dim, hidden)}
        if latent.q_rank is None:
            down = {"q_proj": self._rows(heads, query, hidden)} | down
        else:
            down = {"q_a_proj": _whole(latent.q_rank, hidden)} | down
            self._add(f"{own}.q_latent_norm", {f"{theirs}.q_a_layernorm.weight": _whole(latent.q_rank)})
            self._add(f"{own}.q_up", {f"{theirs}.q_b_proj.weight": self._rows(heads, query, latent.q_rank)})
        self._add(f"{own}.down_qkv", {f"{theirs}.{name}.weight": part for name, part in down.items()})
        for name in down if shape.qkv_bias else ():
            if name != "q_proj":
                self._add(f"{own}.{name}_bias", {f"{theirs}.{name}.bias": _whole(down[name][0][0])})
        self._add(f"{own}.kv_latent_norm", {f"{theirs}.kv_a_layernorm.weight": _whole(latent.kv_rank)})
        up = self._rows(heads, latent.nope_dim + latent.value_dim, latent.kv_rank)
        self._add(f"{own}.kv_up", {f"{theirs}.kv_b_proj.weight": up})
        self._plan_output(shape, latent.value_dim, own, theirs)

    def _plan_output(self, shape: ModelShape, width: int, own: str, theirs: str) -> None:
        """width: of a head's value."""
        self._add(f"{own}.o", {f"{theirs}.o_proj.weight": self._columns(shape.hidden, shape.num_heads, width)})
        if shape.o_bias:
            self._add(f"{own}.o_bias", {f"{theirs}.o_proj.bias": _whole(shape.hidden)})

    def _plan_mlp(self, shape: ModelShape, mlp: int, own: str, theirs: str) -> None:
        both, hidden = ("gate_proj", "up_proj"), shape.hidden
        self._add(f"{own}gate_up", {f"{theirs}.{n}.weight": self._rows(mlp, 1, hidden) for n in both})
        self._add(f"{own}down", {f"{theirs}.down_proj.weight": self._columns(hidden, mlp, 1)})
        if shape.mlp_bias:
            self._add(f"{own}gate_up_bias", {f"{theirs}.{n}.bias": self._rows(mlp, 1) for n in both})
            self._add(f"{own}down_bias", {f"{theirs}.down_proj.bias": _whole(hidden)})

    def _plan_experts(self, shape: ModelShape, experts: ExpertShape, own: str, theirs: str) -> None:
        """Every rank has columns of every expert, and the whole router."""
        count, mlp, hidden = experts.num_experts, experts.mlp, shape.hidden
        dtype = torch.float32 if experts.fp32_router else self._dtype
        self._add(f"{own}.router", {f"{theirs}.gate.weight": _whole(count, hidden)}, dtype)
        if experts.corrected:
            correction = {f"{theirs}.gate.e_score_correction_bias": _whole(count)}
            self._add(f"{own}.correction", correction, torch.float32)
        both = {f"{n}.weight": self._rows(mlp, 1, hidden) for n in ("gate_proj", "up_proj")}
        self._add_stack(f"{own}.experts.gate_up", f"{theirs}.experts", count, both)
        down = {"down_proj.weight": self._columns(hidden, mlp, 1)}
        self._add_stack(f"{own}.experts.down", f"{theirs}.experts", count, down)
        if experts.shared_mlp:
            self._plan_mlp(shape, experts.shared_mlp, f"{own}.shared.", f"{theirs}.shared_experts")

    def _add(self, storage: str, tensors: Mapping[str, Part], dtype: torch.dtype | None = None) -> None:
        """One storage that holds `tensors` one below the other, in the engine's dtype or another one."""
        dtype = dtype or self._dtype
        row = 0
        for name, (shape, box) in tensors.items():
            rows, *others = _extents(box)
            below = ((row, row + rows), *full_box(tuple(others)))
            self._pieces.append(Piece(name, shape, box, storage, below, DTYPE_NAMES[dtype]))
            row += rows
            self._planned[storage] = (row, *others), dtype

    def _add_stack(self, storage: str, prefix: str, count: int, tensors: Mapping[str, Part]) -> None:
        """One storage [count, ...] that holds for each expert `tensors` (prefix.expert.name) one below the other."""
        for expert in range(count):
            row = 0
            for name, (shape, box) in tensors.items():
                rows, *others = _extents(box)
                inside = ((expert, expert + 1), (row, row + rows), *full_box(tuple(others)))
                full = f"{prefix}.{expert}.{name}"
                self._pieces.append(Piece(full, shape, box, storage, inside, DTYPE_NAMES[self._dtype]))
                row += rows
                self._planned[storage] = (count, row, *others), self._dtype


def _whole(*shape: int) -> Part:
    return shape, full_box(shape)


def _extents(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)
