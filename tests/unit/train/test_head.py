import pytest
import torch

from tranship.train import head
from tranship.train.head import token_logprobs


def inputs(num_tokens=7, vocabulary=50, bias=True):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 6, generator=generator, requires_grad=True) for n in (num_tokens, vocabulary))
    offset = torch.randn(vocabulary, generator=generator, requires_grad=True) if bias else None
    return hidden, weight, offset, torch.randint(0, vocabulary, (num_tokens,), generator=generator)


def gradients(values, leaves):
    weights = torch.linspace(-1, 2, len(values))
    return torch.autograd.grad((values * weights).sum(), [leaf for leaf in leaves if leaf is not None])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("block_bytes", "block_rows"), [(1 << 20, 100), (4 * 3 * 11, 3), (4, 1)])
def test_values_and_gradients_equal_the_plain_head(monkeypatch, bias, temperature, block_bytes, block_rows):
    monkeypatch.setattr(head, "MAX_BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(head, "MAX_BLOCK_ROWS", block_rows)
    hidden, weight, offset, target = inputs(bias=bias)
    seen = token_logprobs(hidden, weight, offset, target, temperature=temperature, dtype=torch.float32)
    logits = torch.nn.functional.linear(hidden, weight, offset) / temperature
    plain = logits.log_softmax(-1).gather(1, target[:, None])[:, 0]
    torch.testing.assert_close(seen, plain, rtol=1e-5, atol=1e-5)
    leaves = (hidden, weight, offset)
    for a, b in zip(gradients(seen, leaves), gradients(plain, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_logits_far_apart_do_not_overflow():
    hidden = torch.tensor([[300.0], [-300.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    seen = token_logprobs(hidden, weight, None, torch.tensor([0, 0]), temperature=1.0, dtype=torch.float32)
    assert seen.tolist() == [0, -600]
    assert all(x.isfinite().all() for x in gradients(seen, (hidden, weight)))


def test_no_tokens_give_no_values_and_zero_gradients():
    hidden, weight, offset, target = inputs(num_tokens=0)
    seen = token_logprobs(hidden, weight, offset, target, temperature=1.0, dtype=torch.float32)
    assert seen.shape == (0,)
    assert all((x == 0).all() for x in gradients(seen, (hidden, weight, offset)))


def test_bf16_products_keep_float32_sums():
    hidden, weight, offset, target = inputs(num_tokens=64, vocabulary=2000)
    exact = token_logprobs(hidden, weight, offset, target, temperature=1.0, dtype=torch.float32)
    rough = token_logprobs(hidden, weight, offset, target, temperature=1.0, dtype=torch.bfloat16)
    assert rough.dtype == torch.float32
    assert (rough - exact).abs().max() < 0.1
    leaves = (hidden, weight, offset)
    for a, b in zip(gradients(rough, leaves), gradients(exact, leaves), strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() / b.norm() < 0.02


def test_no_block_of_logits_passes_the_limit(monkeypatch):
    sizes = []
    logits = head._logits
    monkeypatch.setattr(head, "MAX_BLOCK_BYTES", 4096)
    monkeypatch.setattr(head, "_logits", lambda *args: sizes.append(logits(*args).nbytes) or logits(*args))
    hidden, weight, offset, target = inputs(num_tokens=33, vocabulary=1000)
    seen = token_logprobs(hidden, weight, offset, target, temperature=1.0, dtype=torch.float32)
    gradients(seen, (hidden, weight))
    assert max(sizes) <= 4096
    assert sum(sizes) == 2 * 4 * 33 * 1000
