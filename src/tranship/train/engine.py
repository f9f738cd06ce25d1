"""What a training engine is. The train and reference stages use it through this protocol alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch

from tranship.layouts.pieces import Piece
from tranship.types import TrainBatch


@dataclass(frozen=True)
class Totals:
    """What one optimizer step is normalised by, known before its first backward pass, over all ranks.

    num_tokens: unmasked response tokens. num_sequences: samples with at least one. num_groups: prompts that have such
    a sample. max_response_tokens: the cap.
    """

    num_tokens: int
    num_sequences: int
    max_response_tokens: int
    num_groups: int = 0


@dataclass
class LossInputs:
    """One microbatch as the loss sees it: B samples padded to T response tokens; entries outside the mask mean nothing.

    logprobs_BT: float32, requires grad, of the current weights. old_logprobs_BT, advantages_BT: float32.
    ref_logprobs_BT, proximal_logprobs_BT: float32 or None. mask_BT: bool. on_policy_BT: bool or None
    (TrainBatch.on_policy). group_B: int64, samples of one prompt have the same number. entropy_BT: float32, requires
    grad, of the distribution each token was drawn from; None unless the loss asks for it (`needs_entropy`).
    """

    logprobs_BT: torch.Tensor
    old_logprobs_BT: torch.Tensor
    advantages_BT: torch.Tensor
    mask_BT: torch.Tensor
    ref_logprobs_BT: torch.Tensor | None = None
    proximal_logprobs_BT: torch.Tensor | None = None
    on_policy_BT: torch.Tensor | None = None
    group_B: torch.Tensor | None = None
    entropy_BT: torch.Tensor | None = None


@dataclass
class ValueInputs:
    """One microbatch as the critic's loss sees it, padded as LossInputs is.

    values_BT: float32, requires grad, of the current critic. old_values_BT, returns_BT: float32. mask_BT: bool.
    """

    values_BT: torch.Tensor
    old_values_BT: torch.Tensor
    returns_BT: torch.Tensor
    mask_BT: torch.Tensor


# (inputs, totals) -> (scalar loss: this microbatch's share of the step's loss, metrics: name -> (sum, weight)).
# The sums and weights of all microbatches and ranks are added up, then divided.
Metrics = dict[str, tuple[float, float]]
ValueLossFn = Callable[[ValueInputs, Totals], tuple[torch.Tensor, Metrics]]


class LossFn(Protocol):
    """The loss of a policy. needs_entropy: LossInputs.entropy_BT is wanted. whole_groups: all samples of a prompt come
    in one microbatch, since they are compared with each other."""

    @property
    def needs_entropy(self) -> bool: ...
    @property
    def whole_groups(self) -> bool: ...
    def __call__(self, inputs: LossInputs, totals: Totals) -> tuple[torch.Tensor, Metrics]: ...


class LossNeeds(NamedTuple):
    """What a loss asks of the engine; see LossFn."""

    entropy: bool
    whole_groups: bool


def loss_needs(loss: object) -> LossNeeds:
    """What `loss` asks for. A plain function, which has none of LossFn's attributes, asks for nothing."""
    return LossNeeds(
        entropy=bool(getattr(loss, "needs_entropy", False)), whole_groups=bool(getattr(loss, "whole_groups", False))
    )


class CriticEngine(Protocol):
    """One replica's value model: one number per response token, of the state before that token is drawn."""

    def values(
        self, prompts: Sequence[np.ndarray], group_of: np.ndarray, responses: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Values float32 [T_n] of each response token, without gradients."""
        ...

    def update(
        self, batch: TrainBatch, loss: ValueLossFn, fence: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """Train on one batch, as `TrainEngine.update`: needs batch.values and batch.returns."""
        ...

    def skip(self) -> None:
        """Count a batch that nothing is trained on: the learning rate follows the batches of the run."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights, optimizer and schedule so that `load` continues bit for bit."""
        ...

    def load(self, folder: Path) -> None:
        """Take over what `save` wrote. Raises UserError naming what does not fit."""
        ...


class TrainEngine(Protocol):
    """One replica's training weights and their update."""

    @property
    def num_parameters(self) -> int:
        """Trainable elements, each counted once (tied ones too)."""
        ...

    def update(self, batch: TrainBatch, loss: LossFn, fence: Callable[[], None] = lambda: None) -> dict[str, float]:
        """Train on one batch: `train.minibatches` optimizer steps, split over whole groups in the order given.

        fence is called immediately before each optimizer step; what it raises leaves the weights as they are.
        The loss may raise too, with the same effect: gradients are dropped.

        Returns means of the loss's metrics, and loss, grad_norm, learning_rate, num_tokens, tokens_per_s. Raises
        RunError before the weights change if a gradient is not finite.
        """
        ...

    def skip(self) -> None:
        """Count a batch that nothing is trained on: the learning rate follows the batches of the run."""
        ...

    def logprobs(
        self, prompts: Sequence[np.ndarray], group_of: np.ndarray, responses: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Log-probs float32 [T_n] of each response token under the current weights, without gradients.

        They are those of softmax(logits / temperature), as the sampler reports them.
        """
        ...

    def pieces(self) -> list[Piece]:
        """Where this rank's share of the weights lies, by Hugging Face names; a tied tensor appears once."""
        ...

    def storage(self, name: str) -> torch.Tensor:
        """The tensor that pieces call `name`; reading it sees the current weights."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights, optimizer, schedule and random state so that `load` continues bit for bit."""
        ...

    def load(self, folder: Path) -> None:
        """Take over what `save` wrote. Raises UserError naming what does not fit."""
        ...

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder (weights in safetensors, config, tokenizer, chat template)."""
        ...


CRITIC_ENGINES: Mapping[str, str] = {"transformers": "tranship.train.critic:TransformersCritic"}

TRAIN_ENGINES: Mapping[str, str] = {"transformers": "tranship.train.transformers_engine:TransformersEngine"}
