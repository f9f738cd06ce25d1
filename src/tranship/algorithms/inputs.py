"""What a loss gets to see, as protocols: the training engines' own classes fit them."""

from __future__ import annotations

from typing import Protocol

import torch

from tranship.algorithms.masked import Metrics


class Inputs(Protocol):
    """One microbatch: what `tranship.train.engine.LossInputs` holds (B samples, T response tokens)."""

    logprobs_BT: torch.Tensor
    old_logprobs_BT: torch.Tensor
    advantages_BT: torch.Tensor
    mask_BT: torch.Tensor
    ref_logprobs_BT: torch.Tensor | None
    proximal_logprobs_BT: torch.Tensor | None
    group_B: torch.Tensor | None
    entropy_BT: torch.Tensor | None


class CriticInputs(Protocol):
    """One microbatch of the critic: what `tranship.train.engine.ValueInputs` holds."""

    values_BT: torch.Tensor
    old_values_BT: torch.Tensor
    returns_BT: torch.Tensor
    mask_BT: torch.Tensor


class StepTotals(Protocol):
    """The normalisers of one optimizer step: what `tranship.train.engine.Totals` holds."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_sequences(self) -> int: ...
    @property
    def max_response_tokens(self) -> int: ...
    @property
    def num_groups(self) -> int: ...


class Objective(Protocol):
    """A policy's loss: (inputs, totals) -> (scalar share of the step's loss, metrics).

    needs_entropy: entropy_BT is wanted. whole_groups: all samples of a prompt must be in one microbatch.
    """

    @property
    def needs_entropy(self) -> bool: ...
    @property
    def whole_groups(self) -> bool: ...
    def __call__(self, inputs: Inputs, totals: StepTotals) -> tuple[torch.Tensor, Metrics]: ...
