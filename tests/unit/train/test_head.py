import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tranship.train import head
from tranship.train.head import token_logprobs, token_logprobs_and_entropy


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


def plain_entropy(hidden, weight, offset, temperature):
    logits = torch.nn.functional.linear(hidden, weight, offset) / temperature
    return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("block_bytes", "block_rows"), [(1 << 20, 100), (4 * 3 * 11, 3), (4, 1)])
@pytest.mark.parametrize(("a", "b"), [(0.0, 1.0), (1.0, 0.3), (1.0, 0.0)])
def test_entropies_and_mixed_gradients_equal_the_plain_head(
    monkeypatch, bias, temperature, block_bytes, block_rows, a, b
):
    monkeypatch.setattr(head, "MAX_BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(head, "MAX_BLOCK_ROWS", block_rows)
    hidden, weight, offset, target = inputs(bias=bias)
    logprobs, entropy = token_logprobs_and_entropy(
        hidden, weight, offset, target, temperature=temperature, dtype=torch.float32
    )
    alone = token_logprobs(hidden, weight, offset, target, temperature=temperature, dtype=torch.float32)
    assert torch.equal(logprobs, alone)
    expected = plain_entropy(hidden, weight, offset, temperature)
    torch.testing.assert_close(entropy, expected, rtol=1e-5, atol=1e-6)
    logits = torch.nn.functional.linear(hidden, weight, offset) / temperature
    plain = logits.log_softmax(-1).gather(1, target[:, None])[:, 0]
    leaves = (hidden, weight, offset)
    seen = gradients(a * logprobs + b * entropy.square(), leaves)
    for x, y in zip(seen, gradients(a * plain + b * expected.square(), leaves), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_only_the_entropy_may_be_used():
    hidden, weight, offset, target = inputs()
    entropy = token_logprobs_and_entropy(hidden, weight, offset, target, temperature=1.0, dtype=torch.float32)[1]
    expected = plain_entropy(hidden, weight, offset, 1.0)
    leaves = (hidden, weight, offset)
    for x, y in zip(gradients(entropy, leaves), gradients(expected, leaves), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@given(
    scale=st.sampled_from([0.0, 1e-3, 1.0, 30.0, 1e4]),
    shift=st.sampled_from([0.0, 300.0, -300.0]),
    columns=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_an_entropy_lies_between_0_and_that_of_the_uniform_distribution(scale, shift, columns, seed):
    """Large logits cancel nothing: H = lse - sum p z would lose all digits at a shift of 300."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.ones(4, 1)
    weight = torch.randn(9, 1, generator=generator) * scale + shift
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "MAX_BLOCK_BYTES", 4 * 4 * columns)
        target = torch.zeros(4, dtype=torch.int64)
        entropy = token_logprobs_and_entropy(hidden, weight, None, target, temperature=1.0, dtype=torch.float32)[1]
    exact = plain_entropy(hidden.double(), weight.double(), None, 1.0)
    assert ((entropy >= 0) & (entropy <= math.log(9) + 1e-5)).all()
    torch.testing.assert_close(entropy.double(), exact, rtol=1e-4, atol=1e-5)


def test_entropy_of_no_tokens_and_bf16():
    hidden, weight, offset, target = inputs(num_tokens=0)
    results = token_logprobs_and_entropy(hidden, weight, offset, target, temperature=1.0, dtype=torch.float32)
    assert [x.shape for x in results] == [(0,), (0,)]
    hidden, weight, offset, target = inputs(num_tokens=64, vocabulary=2000)
    leaves = (hidden, weight, offset)
    exact, rough = (
        token_logprobs_and_entropy(hidden, weight, offset, target, temperature=1.0, dtype=dtype)[1]
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert (rough - exact).abs().max() < 0.1
    for a, b in zip(gradients(rough, leaves), gradients(exact, leaves), strict=True):
        assert (a - b).norm() / b.norm() < 0.03


def test_no_block_passes_the_limit_with_entropy_and_none_is_computed_when_it_is_not_asked_for(monkeypatch):
    sizes, joined = [], []
    logits, join = head._logits, head._joined_entropy
    monkeypatch.setattr(head, "MAX_BLOCK_BYTES", 4096)
    monkeypatch.setattr(head, "_logits", lambda *args: sizes.append(logits(*args).nbytes) or logits(*args))
    monkeypatch.setattr(head, "_joined_entropy", lambda *args: joined.append(args[2].nbytes) or join(*args))
    hidden, weight, offset, target = inputs(num_tokens=33, vocabulary=1000)
    gradients(token_logprobs(hidden, weight, offset, target, temperature=1.0, dtype=torch.float32), (hidden, weight))
    assert joined == []
    sizes.clear()
    both = token_logprobs_and_entropy(hidden, weight, offset, target, temperature=1.0, dtype=torch.float32)
    gradients(sum(both), (hidden, weight))
    assert max(sizes) <= 4096
    assert sum(sizes) == 2 * sum(joined) == 2 * 4 * 33 * 1000
