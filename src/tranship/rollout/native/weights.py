"""The engine's weights as others write them: fused storages, and the pieces that say what lies where in them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tranship.layouts.pieces import Piece, full_box
from tranship.rollout.native.shape import ExpertShape, LatentShape, ModelShape

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class Weights:
    """Storages by name, allocated and freed together.

    q, k and v of a layer lie one below the other in one storage, and so do gate and up; the experts of a layer are
    stacked. Vectors are storages of their own. A tied head has no storage: it reads the embedding's.
    """

    def __init__(self, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
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
        self._add("embed", {"model.embed_tokens.weight": (shape.vocab, hidden)})
        for index in range(shape.num_layers):
            own, theirs = f"layers.{index}", f"model.layers.{index}"
            self._add(f"{own}.attn_norm", {f"{theirs}.input_layernorm.weight": (hidden,)})
            if shape.latent is None:
                self._plan_heads(shape, own, f"{theirs}.self_attn")
            else:
                self._plan_latent(shape, shape.latent, own, f"{theirs}.self_attn")
            self._add(f"{own}.mlp_norm", {f"{theirs}.post_attention_layernorm.weight": (hidden,)})
            if shape.experts is not None and index in shape.expert_layers:
                self._plan_experts(shape, shape.experts, own, f"{theirs}.mlp")
            else:
                self._plan_mlp(shape, shape.mlp, f"{own}.", f"{theirs}.mlp")
        self._add("norm", {"model.norm.weight": (hidden,)})
        if not shape.tied:
            self._add("lm_head", {"lm_head.weight": (shape.vocab, hidden)})

    def _plan_heads(self, shape: ModelShape, own: str, theirs: str) -> None:
        q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        heads = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        self._add(f"{own}.qkv", {f"{theirs}.{n}.weight": (rows, shape.hidden) for n, rows in heads.items()})
        if shape.qkv_bias:
            self._add(f"{own}.qkv_bias", {f"{theirs}.{n}.bias": (rows,) for n, rows in heads.items()})
        if shape.qk_norm:
            self._add(f"{own}.q_norm", {f"{theirs}.q_norm.weight": (shape.head_dim,)})
            self._add(f"{own}.k_norm", {f"{theirs}.k_norm.weight": (shape.head_dim,)})
        self._plan_output(shape, q, own, theirs)

    def _plan_latent(self, shape: ModelShape, latent: LatentShape, own: str, theirs: str) -> None:
        """What reads the hidden state lies in `down`: the queries (or their latent), then the latent and rotary key."""
        queries = shape.num_heads * (latent.nope_dim + latent.rope_dim)
        down = {"kv_a_proj_with_mqa": latent.kv_rank + latent.rope_dim}
        if latent.q_rank is None:
            down = {"q_proj": queries} | down
        else:
            down = {"q_a_proj": latent.q_rank} | down
            self._add(f"{own}.q_latent_norm", {f"{theirs}.q_a_layernorm.weight": (latent.q_rank,)})
            self._add(f"{own}.q_up", {f"{theirs}.q_b_proj.weight": (queries, latent.q_rank)})
        self._add(f"{own}.down_qkv", {f"{theirs}.{n}.weight": (rows, shape.hidden) for n, rows in down.items()})
        for name in down if shape.qkv_bias else ():
            if name != "q_proj":
                self._add(f"{own}.{name}_bias", {f"{theirs}.{name}.bias": (down[name],)})
        self._add(f"{own}.kv_latent_norm", {f"{theirs}.kv_a_layernorm.weight": (latent.kv_rank,)})
        rows = shape.num_heads * (latent.nope_dim + latent.value_dim)
        self._add(f"{own}.kv_up", {f"{theirs}.kv_b_proj.weight": (rows, latent.kv_rank)})
        self._plan_output(shape, shape.num_heads * latent.value_dim, own, theirs)

    def _plan_output(self, shape: ModelShape, width: int, own: str, theirs: str) -> None:
        self._add(f"{own}.o", {f"{theirs}.o_proj.weight": (shape.hidden, width)})
        if shape.o_bias:
            self._add(f"{own}.o_bias", {f"{theirs}.o_proj.bias": (shape.hidden,)})

    def _plan_mlp(self, shape: ModelShape, mlp: int, own: str, theirs: str) -> None:
        hidden = shape.hidden
        self._add(f"{own}gate_up", {f"{theirs}.{n}.weight": (mlp, hidden) for n in ("gate_proj", "up_proj")})
        self._add(f"{own}down", {f"{theirs}.down_proj.weight": (hidden, mlp)})
        if shape.mlp_bias:
            self._add(f"{own}gate_up_bias", {f"{theirs}.{n}.bias": (mlp,) for n in ("gate_proj", "up_proj")})
            self._add(f"{own}down_bias", {f"{theirs}.down_proj.bias": (hidden,)})

    def _plan_experts(self, shape: ModelShape, experts: ExpertShape, own: str, theirs: str) -> None:
        count, mlp, hidden = experts.num_experts, experts.mlp, shape.hidden
        dtype = torch.float32 if experts.fp32_router else self._dtype
        self._add(f"{own}.router", {f"{theirs}.gate.weight": (count, hidden)}, dtype)
        if experts.corrected:
            self._add(f"{own}.correction", {f"{theirs}.gate.e_score_correction_bias": (count,)}, torch.float32)
        both = {f"{n}.weight": (mlp, hidden) for n in ("gate_proj", "up_proj")}
        self._add_stack(f"{own}.experts.gate_up", f"{theirs}.experts", count, both)
        self._add_stack(f"{own}.experts.down", f"{theirs}.experts", count, {"down_proj.weight": (hidden, mlp)})
        if experts.shared_mlp:
            self._plan_mlp(shape, experts.shared_mlp, f"{own}.shared.", f"{theirs}.shared_experts")

    def _add(self, storage: str, tensors: dict[str, tuple[int, ...]], dtype: torch.dtype | None = None) -> None:
        """One storage that holds `tensors` one below the other, in the engine's dtype or another one."""
        dtype = dtype or self._dtype
        row = 0
        for name, shape in tensors.items():
            box = full_box(shape)
            below = ((row, row + shape[0]), *box[1:])
            self._pieces.append(Piece(name, shape, box, storage, below, DTYPE_NAMES[dtype]))
            row += shape[0]
            self._planned[storage] = (row, *shape[1:]), dtype

    def _add_stack(self, storage: str, prefix: str, count: int, tensors: Mapping[str, tuple[int, ...]]) -> None:
        """One storage [count, ...] that holds for each expert `tensors` (prefix.expert.name) one below the other."""
        for expert in range(count):
            row = 0
            for name, shape in tensors.items():
                box = full_box(shape)
                inside = ((expert, expert + 1), (row, row + shape[0]), *box[1:])
                full = f"{prefix}.{expert}.{name}"
                self._pieces.append(Piece(full, shape, box, storage, inside, DTYPE_NAMES[self._dtype]))
                row += shape[0]
                self._planned[storage] = (count, row, *shape[1:]), self._dtype
