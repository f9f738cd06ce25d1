"""The second half of a decoder layer: one gated mlp for every token, or routed experts.

Letters: N tokens, H hidden, I width of an mlp, E experts, K experts of a token.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

from tranship.rollout.native.kernels import ExpertsArguments, Kernels
from tranship.rollout.native.linear import make_gated, make_linear
from tranship.rollout.native.norm import RmsNorm, fold_norm
from tranship.rollout.native.ranks import Ranks
from tranship.rollout.native.shape import ExpertShape, ModelShape
from tranship.rollout.native.summed import make_summed, once
from tranship.rollout.native.weights import Weights


class FeedForward(Protocol):
    """The second half of a layer."""

    def __call__(self, x_NH: torch.Tensor) -> torch.Tensor:
        """x plus what the layer makes of it."""
        ...


class GatedMlp:
    """down(silu(gate x) * up x), of gate_up [2 I, H] and down [H, I] with their biases. ranks: those that have other
    columns, whose results are added; None: what lies here is the result."""

    def __init__(
        self,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
        *,
        kernels: Kernels | None,
        ranks: Ranks | None = None,
    ) -> None:
        self.gated = make_gated(gate_up, gate_up_bias, kernels)
        self.down = make_summed(down, down_bias, kernels, ranks)

    def __call__(self, x_NH: torch.Tensor) -> torch.Tensor:
        """[N, H]."""
        return self.down(self.gated(x_NH))

    def add(self, x_NH: torch.Tensor, other_NH: torch.Tensor) -> torch.Tensor:
        """The same plus `other_NH`."""
        return self.down.add(self.gated(x_NH), other_NH)


class DenseMlp:
    """One mlp for every token."""

    def __init__(
        self, shape: ModelShape, weights: Weights, own: str, kernels: Kernels | None, ranks: Ranks | None
    ) -> None:
        norm, gate_up = fold_norm(weights[f"{own}.mlp_norm"], weights[f"{own}.gate_up"])
        self.norm = RmsNorm(norm, shape.norm_eps, gate_up.device, kernels)
        biases = weights.get(f"{own}.gate_up_bias"), weights.get(f"{own}.down_bias")
        self.mlp = GatedMlp(gate_up, weights[f"{own}.down"], *biases, kernels=kernels, ranks=ranks)

    def __call__(self, x_NH: torch.Tensor) -> torch.Tensor:
        return self.mlp.add(self.norm(x_NH), x_NH)


class ExpertMlp:
    """Routed experts, and those that every token passes.

    ranks: those that have other columns of every expert; what all experts make is summed over them once.
    """

    def __init__(
        self,
        shape: ModelShape,
        experts: ExpertShape,
        weights: Weights,
        own: str,
        kernels: Kernels | None,
        ranks: Ranks | None,
    ) -> None:
        self.ranks = ranks
        gate_up, down = weights[f"{own}.experts.gate_up"], weights[f"{own}.experts.down"]
        self.norm = RmsNorm(weights[f"{own}.mlp_norm"], shape.norm_eps, gate_up.device, kernels)
        self.router = Router(experts, weights[f"{own}.router"], weights.get(f"{own}.correction"), kernels)
        self.routed = make_routed(gate_up, down, kernels)
        self.shared = None
        if experts.shared_mlp:
            biases = weights.get(f"{own}.shared.gate_up_bias"), once(weights.get(f"{own}.shared.down_bias"), ranks)
            self.shared = GatedMlp(
                weights[f"{own}.shared.gate_up"], weights[f"{own}.shared.down"], *biases, kernels=kernels
            )

    def __call__(self, x_NH: torch.Tensor) -> torch.Tensor:
        normed_NH = self.norm(x_NH)
        total_NH = self.routed(normed_NH, *self.router(normed_NH))
        if self.ranks is not None:
            total_NH = total_NH if self.shared is None else total_NH.add_(self.shared(normed_NH))
            return x_NH + self.ranks.sum(total_NH).to(x_NH.dtype)
        out = x_NH + total_NH.to(x_NH.dtype)
        return out if self.shared is None else self.shared.add(normed_NH, out)


class Routed(Protocol):
    """What the chosen experts make of each token. It does not depend on the other tokens: the experts' products are
    added in the order of its choice."""

    def __call__(self, x_NH: torch.Tensor, chosen_NK: torch.Tensor, share_NK: torch.Tensor) -> torch.Tensor:
        """float32 [N, H]: the sum of what the experts int64 [N, K] make, times their shares float32 [N, K]."""
        ...


class PlainExperts:
    """Tokens are sorted by expert; each expert runs once."""

    def __init__(self, experts: list[GatedMlp]) -> None:
        self._experts = experts

    def __call__(self, x_NH: torch.Tensor, chosen_NK: torch.Tensor, share_NK: torch.Tensor) -> torch.Tensor:
        order = chosen_NK.flatten().argsort(stable=True)
        counts = torch.bincount(chosen_NK.flatten(), minlength=len(self._experts)).tolist()
        inputs = x_NH.index_select(0, order // chosen_NK.shape[1])
        made = torch.empty_like(inputs)
        at = 0
        for expert, count in zip(self._experts, counts, strict=True):
            if count:
                made[order[at : at + count]] = expert(inputs[at : at + count])
                at += count
        made_NKH = made.view(*chosen_NK.shape, -1)
        total_NH = torch.zeros(x_NH.shape, dtype=torch.float32, device=x_NH.device)
        for place in range(chosen_NK.shape[1]):
            total_NH.addcmul_(made_NKH[:, place].float(), share_NK[:, place, None])
        return total_NH


class CompiledExperts:
    """All experts in one call of the compiled kernels."""

    def __init__(self, kernels: Kernels, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        self._kernels = kernels
        self._packed = [
            (kernels.pack(one, gate=True), kernels.pack(other, gate=False))
            for one, other in zip(gate_up, down, strict=True)
        ]
        # int64 [2, E]: addresses of each expert's two weights.
        self.places = torch.tensor([[weight.data_ptr() for weight in pair] for pair in self._packed]).t().contiguous()
        self.mlp = down.shape[2]

    def __call__(self, x_NH: torch.Tensor, chosen_NK: torch.Tensor, share_NK: torch.Tensor) -> torch.Tensor:
        x_NH, chosen_NK, share_NK = x_NH.contiguous(), chosen_NK.contiguous(), share_NK.contiguous()
        rows, hidden = x_NH.shape
        pairs = chosen_NK.numel()
        inputs, made = torch.empty(2, pairs, hidden, dtype=x_NH.dtype)
        gated = torch.empty(pairs, self.mlp, dtype=x_NH.dtype)
        out = torch.empty(rows, hidden)
        gate_up, down = self.places
        self._kernels.experts(
            ExpertsArguments(
                x=x_NH.data_ptr(),
                chosen=chosen_NK.data_ptr(),
                shares=share_NK.data_ptr(),
                gate_up=gate_up.data_ptr(),
                down=down.data_ptr(),
                rows=rows,
                hidden=hidden,
                mlp=self.mlp,
                count=len(self._packed),
                top_k=chosen_NK.shape[1],
                wide=x_NH.dtype == torch.float32,
                inputs=inputs.data_ptr(),
                gated=gated.data_ptr(),
                made=made.data_ptr(),
                out=out.data_ptr(),
            )
        )
        return out


def make_routed(gate_up: torch.Tensor, down: torch.Tensor, kernels: Kernels | None) -> Routed:
    """Experts of weights [E, 2 I, H] and [E, H, I]."""
    if kernels is not None and kernels.has_product(gate_up[0]) and kernels.has_product(down[0]):
        return CompiledExperts(kernels, gate_up, down)
    return PlainExperts([GatedMlp(one, other, kernels=kernels) for one, other in zip(gate_up, down, strict=True)])


class Router:
    """Which experts a token passes, and the share of each (Qwen3-MoE; DeepSeek-V2, section 2.1.3; DeepSeek-V3, Liu et
    al. 2024, section 2.1.2, equations 13 to 16)."""

    def __init__(
        self,
        experts: ExpertShape,
        weight_EH: torch.Tensor,
        correction_E: torch.Tensor | None,
        kernels: Kernels | None = None,
    ) -> None:
        self.kind = experts
        self.product = make_linear(weight_EH, None, kernels)
        self._dtype = weight_EH.dtype
        self._correction_E = correction_E
        self._kernels = kernels if self.is_plain else None

    @property
    def is_plain(self) -> bool:
        """Whether the largest of a softmax over all experts are chosen: what the compiled kernels can do."""
        kind = self.kind
        return kind.scores == "softmax" and self._correction_E is None and kind.top_groups == kind.num_groups

    def __call__(self, x_NH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(experts int64 [N, K], shares float32 [N, K])."""
        kind = self.kind
        logits_NE = self.product(x_NH.to(self._dtype)).float()
        if self._kernels is not None:
            return self._kernels.route(logits_NE, kind.top_k, normalised=kind.normalised, scale=kind.scale)
        scores_NE = torch.softmax(logits_NE, -1) if kind.scores == "softmax" else _sigmoid(logits_NE)
        choice_NE = scores_NE if self._correction_E is None else scores_NE + self._correction_E
        if kind.top_groups < kind.num_groups:
            choice_NE = self._within_groups(choice_NE)
        chosen_NK = choice_NE.topk(kind.top_k, -1).indices
        share_NK = scores_NE.gather(1, chosen_NK)
        if kind.normalised:
            share_NK = share_NK / share_NK.sum(-1, keepdim=True)
        return chosen_NK, share_NK * kind.scale

    def _within_groups(self, choice_NE: torch.Tensor) -> torch.Tensor:
        """The scores, with -inf for experts outside the best groups."""
        kind = self.kind
        grouped = choice_NE.unflatten(-1, (kind.num_groups, -1))
        best = grouped.topk(kind.best_of, -1).values.sum(-1).topk(kind.top_groups, -1).indices
        out = torch.ones(grouped.shape[:2], dtype=torch.bool, device=choice_NE.device).scatter_(1, best, False)
        return grouped.masked_fill(out[..., None], float("-inf")).flatten(1)


def _sigmoid(x_NE: torch.Tensor) -> torch.Tensor:
    """The sigmoid of each element, the same to the bit for any N: the rest that does not fill a vector would be
    computed by another function, so there is none."""
    count = x_NE.shape[0]
    return torch.sigmoid(functional.pad(x_NE, (0, 0, 0, -count % 64)))[:count]


def make_feed_forward(
    shape: ModelShape, weights: Weights, index: int, kernels: Kernels | None, ranks: Ranks | None
) -> FeedForward:
    """The second half of layer `index`. kernels: for its norm. shape: of what lies here; ranks: those that have the
    other columns."""
    own = f"layers.{index}"
    if shape.experts is not None and index in shape.expert_layers:
        return ExpertMlp(shape, shape.experts, weights, own, kernels, ranks)
    return DenseMlp(shape, weights, own, kernels, ranks)
