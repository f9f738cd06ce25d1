"""Losses of preferences: a chosen and a rejected response to the same prompt.

Shapes: B samples, T response tokens, P pairs. chosen_P and rejected_P are log(policy / reference) of whole responses:
sums over their unmasked tokens. beta times that is the reward that the policy stands for (arXiv:2305.18290, eq. 5).
Metrics: pair_margin (chosen less rejected reward), pair_accuracy (margin above 0), pair_chosen_reward and
pair_rejected_reward, as (sum, number of pairs).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from tranship.algorithms.inputs import Inputs, StepTotals
from tranship.algorithms.masked import Metrics, masked_sum, metric
from tranship.types import UserError


def dpo(
    chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, beta: float = 0.1, label_smoothing: float = 0.0
) -> tuple[torch.Tensor, Metrics]:
    """(losses_P, metrics) of -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h), h = chosen_P - rejected_P.

    Direct preference optimization (arXiv:2305.18290, eq. 7). label_smoothing e, 0 to below 0.5: the share of labels
    that are thought to be the wrong way round (Mitchell 2023, "A note on DPO with noisy preferences"; 0 is DPO). At
    h = 0 the loss is log 2 = .693147.
    """
    _check_beta(beta, "dpo")
    if not 0 <= label_smoothing < 0.5:
        raise UserError(f"algorithm.loss_args: label_smoothing of dpo is {label_smoothing}: choose 0 to below 0.5")
    margin_P = beta * (chosen_P - rejected_P)
    losses_P = -(1 - label_smoothing) * logsigmoid(margin_P)
    if label_smoothing:
        losses_P = losses_P - label_smoothing * logsigmoid(-margin_P)
    return losses_P, _metrics(chosen_P, rejected_P, beta)


def ipo(chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, beta: float = 0.1) -> tuple[torch.Tensor, Metrics]:
    """(losses_P, metrics) of (h - 1 / (2 beta))^2, h = chosen_P - rejected_P.

    Identity preference optimization (arXiv:2310.12036, eq. 17; beta is its tau). The sums are over tokens, as in the
    paper, not means. At h = 0 and beta .1 the loss is 25.
    """
    _check_beta(beta, "ipo")
    losses_P = (chosen_P - rejected_P - 1 / (2 * beta)).square()
    return losses_P, _metrics(chosen_P, rejected_P, beta)


@dataclass(frozen=True)
class PairObjective:
    """(inputs, totals) -> (this microbatch's share of the mean loss over the step's pairs, metrics).

    Chosen rows have advantages above 0 at all their unmasked tokens, rejected rows below 0; a pair is one of each with
    the same number in group_B. A group of which only one side has an unmasked token is no pair: it adds nothing, counts
    in totals.num_groups, and shows in the metric pair_incomplete_frac.
    """

    pair_loss: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, Metrics]]
    needs_entropy: bool = False
    whole_groups: bool = True

    def __call__(self, inputs: Inputs, totals: StepTotals) -> tuple[torch.Tensor, Metrics]:
        """Adds up over microbatches and ranks; 0 where nothing is unmasked."""
        assert inputs.ref_logprobs_BT is not None, "a loss of pairs needs ref_logprobs"
        assert inputs.group_B is not None, "a loss of pairs needs group_B"
        log_ratio_B = masked_sum(inputs.logprobs_BT - inputs.ref_logprobs_BT, inputs.mask_BT, dim=-1)
        chosen_G, rejected_G = _sides(inputs.group_B, inputs.advantages_BT, inputs.mask_BT)
        complete_G = (chosen_G >= 0) & (rejected_G >= 0)
        chosen_P, rejected_P = log_ratio_B[chosen_G[complete_G]], log_ratio_B[rejected_G[complete_G]]
        losses_P, metrics = self.pair_loss(chosen_P, rejected_P)
        assert losses_P.shape == chosen_P.shape, f"the loss returned {tuple(losses_P.shape)} for {len(chosen_P)} pairs"
        present_G = (chosen_G >= 0) | (rejected_G >= 0)
        metrics = {**metrics, "pair_incomplete_frac": metric((~complete_G).float(), present_G)}
        return losses_P.sum() / max(1, totals.num_groups), metrics


def _sides(
    group_B: torch.Tensor, advantages_BT: torch.Tensor, mask_BT: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(row of the chosen response of each group, row of the rejected one), int64 [G]; -1 where there is none."""
    groups_G, index_B = torch.unique(group_B, return_inverse=True)
    length_B = mask_BT.sum(-1)
    sides = []
    decided_B = length_B == 0
    for side_BT in (advantages_BT > 0, advantages_BT < 0):
        rows = torch.nonzero((length_B > 0) & ((side_BT & mask_BT).sum(-1) == length_B)).squeeze(-1)
        assert len(torch.unique(index_B[rows])) == len(rows), "a group has two responses on the same side of a pair"
        decided_B = decided_B.index_fill(0, rows, True)
        row_G = torch.full((len(groups_G),), -1, dtype=torch.int64, device=group_B.device)
        sides.append(row_G.index_copy(0, index_B[rows], rows))
    assert bool(decided_B.all()), "advantages of a pair must be all above 0 (chosen) or all below 0 (rejected) in a row"
    return sides[0], sides[1]


def _metrics(chosen_P: torch.Tensor, rejected_P: torch.Tensor, beta: float) -> Metrics:
    every_P = torch.ones_like(chosen_P, dtype=torch.bool)
    return {
        "pair_margin": metric(beta * (chosen_P - rejected_P), every_P),
        "pair_accuracy": metric((chosen_P > rejected_P).float(), every_P),
        "pair_chosen_reward": metric(beta * chosen_P, every_P),
        "pair_rejected_reward": metric(beta * rejected_P, every_P),
    }


def _check_beta(beta: float, name: str) -> None:
    if not beta > 0:
        raise UserError(f"algorithm.loss_args: beta of {name} is {beta}: choose a number above 0")
