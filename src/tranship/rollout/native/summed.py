"""Products whose weight lies on several ranks, as the layers use them: like any `Linear`, with a whole result."""

from __future__ import annotations

import torch

from tranship.rollout.native.kernels import Kernels
from tranship.rollout.native.linear import Linear, make_linear
from tranship.rollout.native.ranks import Ranks


class SummedLinear:
    """A product of which each rank has some columns of the weight, and of x; sums are taken in fp32."""

    def __init__(self, part: Linear, ranks: Ranks) -> None:
        self._part = part
        self._ranks = ranks

    def __call__(self, x_NI: torch.Tensor) -> torch.Tensor:
        return self.wide(x_NI).to(x_NI.dtype)

    def add(self, x_NI: torch.Tensor, other_NO: torch.Tensor) -> torch.Tensor:
        return self.wide(x_NI).add_(other_NO).to(x_NI.dtype)

    def wide(self, x_NI: torch.Tensor) -> torch.Tensor:
        return self._ranks.sum(self._part.wide(x_NI).contiguous())


class WholeLogits:
    """The head, of whose weight each rank has a stretch of rows, as `linear.Linear.wide`.

    vocab: rows of the whole weight. The last rank may have fewer than the others, and fills up.
    """

    def __init__(self, part: Linear, ranks: Ranks, vocab: int) -> None:
        self._part = part
        self._ranks = ranks
        self._vocab = vocab
        start, stop = ranks.share.stretch(vocab)
        self._missing = ranks.share.step(vocab) - (stop - start)

    def wide(self, x_NI: torch.Tensor) -> torch.Tensor:
        """float32 [N, vocab]."""
        own = torch.nn.functional.pad(self._part.wide(x_NI), (0, self._missing))
        return self._ranks.columns(own)[:, : self._vocab].contiguous()


def make_summed(
    weight_OI: torch.Tensor, bias_O: torch.Tensor | None, kernels: Kernels | None, ranks: Ranks | None
) -> Linear:
    """The product with a weight of which this rank has some columns. bias: of the whole product; one rank adds it."""
    if ranks is None:
        return make_linear(weight_OI, bias_O, kernels)
    return SummedLinear(make_linear(weight_OI, once(bias_O, ranks), kernels), ranks)


def once(bias_O: torch.Tensor | None, ranks: Ranks | None) -> torch.Tensor | None:
    """The bias of a sum over ranks, on the rank that adds it."""
    return bias_O if ranks is None or ranks.share.rank == 0 else None
