"""What packed training is compared with: padded batches in transformers' own forward, and gradients side by side."""

import numpy as np
import torch


def padded(columns):
    """[N, T]: arrays of different lengths, with zeros after their ends."""
    width = max(map(len, columns))
    return torch.from_numpy(np.stack([np.pad(c, (0, width - len(c))) for c in columns]))


def padded_rows(batch):
    """(token ids, attention mask), int64 [N, L]: each row with its own copy of the prompt."""
    rows = [np.concatenate([batch.prompts[g], r]) for g, r in zip(batch.group_of, batch.responses, strict=True)]
    return padded(rows).long(), padded([np.ones(len(row), dtype=np.int64) for row in rows])


def before_each_token(batch, values):
    """[N, T, ...]: of values [N, L, ...], those at the tokens that the response tokens are predicted from."""
    result = values.new_zeros(len(batch), max(map(len, batch.responses)), *values.shape[2:])
    for i, (group, response) in enumerate(zip(batch.group_of, batch.responses, strict=True)):
        start = len(batch.prompts[group]) - 1
        result[i, : len(response)] = values[i, start : start + len(response)]
    return result


def plain_distributions(model, batch, temperature=1.0):
    """[N, T, V]: the log-softmax that each response token is drawn from."""
    tokens, attended = padded_rows(batch)
    logits = model(input_ids=tokens, attention_mask=attended, use_cache=False).logits / temperature
    return before_each_token(batch, logits).log_softmax(-1)


def plain_logprobs(model, batch, temperature=1.0):
    """[N, T]: log-probs of the response tokens."""
    tokens = padded(batch.responses).long()
    return plain_distributions(model, batch, temperature).gather(2, tokens[..., None])[..., 0]


def gradients_of(module):
    """Every parameter's gradient by name."""
    return {name: p.grad for name, p in module.named_parameters()}


def assert_same_gradients(seen, expected, tolerance=1e-5):
    """Each gradient within the relative tolerance of the expected one."""
    assert seen.keys() == expected.keys()
    for name, gradient in expected.items():
        gap = (seen[name] - gradient).norm() / gradient.norm()
        assert gap <= tolerance, (name, gap)
