"""From token losses to a scalar: a microbatch's share of the step's loss, under the step's one normaliser."""

from __future__ import annotations

import torch

from tranship.algorithms.masked import masked_mean, masked_sum
from tranship.config.schema import Aggregation


def aggregate(
    token_losses_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    mode: Aggregation,
    *,
    num_tokens: int,
    num_sequences: int,
    max_response_tokens: int,
) -> torch.Tensor:
    """This microbatch's share (a scalar) of the step's loss; the shares of all microbatches and ranks add up to it.

    num_tokens, num_sequences: unmasked tokens, and rows with at least one, of the whole optimizer step. A row without
    any unmasked token is no sequence: it adds nothing and counts nowhere. With nothing unmasked the share is 0.

    token-mean                sum of all tokens / num_tokens (DAPO, arXiv:2503.14476, eq. 8)
    seq-mean-token-sum        mean over rows of the row's sum
    seq-mean-token-mean       mean over rows of the row's mean (GRPO, arXiv:2402.03300, eq. 3)
    seq-mean-token-sum-norm   sum / (num_sequences * max_response_tokens) (Dr. GRPO, arXiv:2503.20783)

    Losses [[1,1,1,1],[5]]: 1.8, 4.5, 3.0, and with max_response_tokens 4: 1.125.
    """
    sequences = max(1, num_sequences)
    match mode:
        case "token-mean":
            return masked_sum(token_losses_BT, mask_BT) / max(1, num_tokens)
        case "seq-mean-token-sum":
            return masked_sum(token_losses_BT, mask_BT) / sequences
        case "seq-mean-token-mean":
            return masked_mean(token_losses_BT, mask_BT, dim=-1).sum() / sequences
        case "seq-mean-token-sum-norm":
            return masked_sum(token_losses_BT, mask_BT) / (sequences * max_response_tokens)
