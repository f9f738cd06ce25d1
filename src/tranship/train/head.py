"""Log-probs of chosen tokens without the logits: the output head, log-softmax and their gradients, block by block.

The entropy of each token's distribution comes from the same blocks, where it is asked for. Letters: M predicted
tokens, E hidden size, V vocabulary. A block of logits covers some tokens and some of the vocabulary, so memory does
not grow with M * V. The backward pass computes the logits once more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

MAX_BLOCK_BYTES = 32 << 20
MAX_BLOCK_ROWS = 8192


def token_logprobs(
    hidden_ME: torch.Tensor,
    weight_VE: torch.Tensor,
    bias_V: torch.Tensor | None,
    target_M: torch.Tensor,
    *,
    temperature: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """float32 [M]: log softmax((hidden @ weight.T + bias) / temperature) at target, differentiable.

    dtype: that of the matrix products (float32 or bfloat16); sums, exponentials and gradients of the weight are
    float32. Gradients reach hidden, weight and bias.
    """
    return _TokenLogprobs.apply(hidden_ME, weight_VE, bias_V, target_M, temperature, dtype, False)[0]


def token_logprobs_and_entropy(
    hidden_ME: torch.Tensor,
    weight_VE: torch.Tensor,
    bias_V: torch.Tensor | None,
    target_M: torch.Tensor,
    *,
    temperature: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(what token_logprobs gives, the entropy float32 [M] of the same distributions in nats), both differentiable."""
    return _TokenLogprobs.apply(hidden_ME, weight_VE, bias_V, target_M, temperature, dtype, True)


def _blocks(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def _block_sizes(num_tokens: int, vocabulary: int) -> tuple[int, int]:
    rows = min(num_tokens, MAX_BLOCK_ROWS)
    return rows, max(1, min(vocabulary, MAX_BLOCK_BYTES // (4 * rows)))


def _logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """float32 logits of a block, from operands of the products' dtype."""
    logits = (hidden @ weight.T).float()
    return logits if bias is None else logits.add_(bias.float())


class _TokenLogprobs(torch.autograd.Function):
    """(log-probs [M], entropies [M] or None where they are not asked for)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ME: torch.Tensor,
        weight_VE: torch.Tensor,
        bias_V: torch.Tensor | None,
        target_M: torch.Tensor,
        temperature: float,
        dtype: torch.dtype,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        num_tokens, vocabulary = hidden_ME.shape[0], weight_VE.shape[0]
        lse_M = torch.full((num_tokens,), -torch.inf, dtype=torch.float32, device=hidden_ME.device)
        at_target_M = torch.zeros_like(lse_M)
        entropy_M = torch.zeros_like(lse_M) if with_entropy else None
        scaled_ME = (hidden_ME.float() / temperature).to(dtype)
        scaled_bias_V = None if bias_V is None else bias_V / temperature
        if num_tokens:
            max_rows, max_columns = _block_sizes(num_tokens, vocabulary)
            for columns in _blocks(vocabulary, max_columns):
                weight = weight_VE[columns].to(dtype)
                bias = None if scaled_bias_V is None else scaled_bias_V[columns]
                for rows in _blocks(num_tokens, max_rows):
                    logits = _logits(scaled_ME[rows], weight, bias)
                    local = target_M[rows] - columns.start
                    here = (local >= 0) & (local < logits.shape[1])
                    chosen = logits.gather(1, local.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
                    at_target_M[rows] = torch.where(here, chosen, at_target_M[rows])
                    block_lse = torch.logsumexp(logits, dim=1)
                    if entropy_M is not None:
                        entropy_M[rows] = _joined_entropy(entropy_M[rows], lse_M[rows], logits, block_lse)
                    lse_M[rows] = torch.logaddexp(lse_M[rows], block_lse)
        ctx.save_for_backward(hidden_ME, weight_VE, bias_V, target_M, lse_M, entropy_M)
        ctx.set_materialize_grads(False)
        ctx.temperature = temperature
        ctx.dtype = dtype
        return at_target_M - lse_M, entropy_M

    @staticmethod
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any, grad_M: torch.Tensor | None, entropy_grad_M: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """With p = softmax and H its entropy: d logit = grad * (onehot(target) - p) - entropy_grad * p * (log p + H).

        Without entropy_grad, the rows' grad is applied to the narrow operands instead of to p.
        """
        hidden_ME, weight_VE, bias_V, target_M, lse_M, entropy_M = ctx.saved_tensors
        dtype = ctx.dtype
        grad_M1 = (torch.zeros_like(lse_M) if grad_M is None else grad_M / ctx.temperature)[:, None]
        entropy_grad_M1 = None if entropy_grad_M is None else (entropy_grad_M / ctx.temperature)[:, None]
        scaled_ME = (hidden_ME.float() / ctx.temperature).to(dtype)
        scaled_bias_V = None if bias_V is None else bias_V / ctx.temperature
        weighted_ME = hidden_ME.float() * grad_M1
        operand_ME = (weighted_ME if entropy_grad_M1 is None else hidden_ME).to(dtype)
        expected_ME = torch.zeros_like(weighted_ME)
        weight_grad_VE = torch.zeros_like(weight_VE)
        bias_grad_V = None if bias_V is None else torch.zeros_like(bias_V)
        num_tokens, vocabulary = hidden_ME.shape[0], weight_VE.shape[0]
        if num_tokens:
            max_rows, max_columns = _block_sizes(num_tokens, vocabulary)
            for columns in _blocks(vocabulary, max_columns):
                weight = weight_VE[columns].to(dtype)
                bias = None if scaled_bias_V is None else scaled_bias_V[columns]
                for rows in _blocks(num_tokens, max_rows):
                    p = _logits(scaled_ME[rows], weight, bias).sub_(lse_M[rows, None])
                    if entropy_grad_M1 is None:
                        p.exp_()
                        if bias_grad_V is not None:
                            bias_grad_V[columns] -= grad_M1[rows, 0] @ p
                    else:
                        factor = (p + entropy_M[rows, None]).mul_(entropy_grad_M1[rows]).add_(grad_M1[rows])
                        p.exp_().mul_(factor)
                        if bias_grad_V is not None:
                            bias_grad_V[columns] -= p.sum(0)
                    p = p.to(dtype)
                    expected_ME[rows] += p @ weight
                    weight_grad_VE[columns] -= p.T @ operand_ME[rows]
            weight_grad_VE.index_add_(0, target_M, weighted_ME.to(weight_VE.dtype))
            if bias_grad_V is not None:
                bias_grad_V.index_add_(0, target_M, grad_M1[:, 0].to(bias_grad_V.dtype))
        at_target_ME = weight_VE[target_M].float()
        if entropy_grad_M1 is None:
            hidden_grad_ME = (at_target_ME - expected_ME) * grad_M1
        else:
            hidden_grad_ME = at_target_ME * grad_M1 - expected_ME
        return hidden_grad_ME.to(hidden_ME.dtype), weight_grad_VE, bias_grad_V, None, None, None, None


def _joined_entropy(
    entropy: torch.Tensor, lse: torch.Tensor, logits: torch.Tensor, block_lse: torch.Tensor
) -> torch.Tensor:
    """The entropy of the columns so far with a block's added: H = w H1 + v H2 - w log w - v log v, with v = 1 - w.

    Every term is at least 0, so that large logits cancel nothing.
    """
    log_p = logits.log_softmax(1)
    block_entropy = -(log_p.exp() * log_p).sum(1)
    weight, block_weight = torch.sigmoid(lse - block_lse), torch.sigmoid(block_lse - lse)
    mixed = torch.special.entr(weight) + torch.special.entr(block_weight)
    return weight * entropy + block_weight * block_entropy + mixed
