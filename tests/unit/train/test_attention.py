import numpy as np
import pytest
import torch

from tranship.train import attention
from tranship.train.attention import packed_attention
from tranship.train.packing import pack, rows_by_prompt
from tranship.types import UserError

CPU = torch.device("cpu")


def index(group_of, prompt_lengths, response_lengths):
    prompts = [np.zeros(n, dtype=np.int32) for n in prompt_lengths]
    responses = [np.zeros(n, dtype=np.int32) for n in response_lengths]
    shares = rows_by_prompt(len(prompts), np.array(group_of))
    return pack(shares, prompts, responses, wanted=None, device=CPU).attention


def attend(places, scaling=0.3, heads=6, kv_heads=2, value_size=8, **options):
    generator = torch.Generator().manual_seed(0)
    tokens = len(places.inverse)
    states = [
        torch.randn(1, n, tokens, size, generator=generator, requires_grad=True)
        for n, size in ((heads, 8), (kv_heads, 8), (kv_heads, value_size))
    ]
    module = torch.nn.Module()
    attended, _ = packed_attention(module, *states, None, scaling=scaling, packed_index=places, **options)
    weights = torch.randn(attended.shape, generator=generator)
    return attended, torch.autograd.grad((attended * weights).sum(), states)


@pytest.mark.parametrize("limit", [1 << 20, 400])
@pytest.mark.parametrize(("kv_heads", "value_size"), [(1, 8), (2, 8), (6, 8), (2, 5)])
@pytest.mark.parametrize("scaling", [0.3, None])
@pytest.mark.parametrize("shape", [([0, 1, 1, 0, 1], [3, 5], [4, 1, 7, 2, 3]), ([0], [1], [1]), ([0, 0], [2], [0, 5])])
def test_batched_products_equal_sdpa(monkeypatch, limit, kv_heads, value_size, scaling, shape):
    places = index(*shape)
    monkeypatch.setattr(attention, "MAX_SCORE_BYTES", limit)
    seen, seen_gradients = attend(places, scaling, kv_heads=kv_heads, value_size=value_size)
    monkeypatch.setattr(attention, "MAX_SCORE_BYTES", 0)
    plain, plain_gradients = attend(places, scaling, kv_heads=kv_heads, value_size=value_size)
    torch.testing.assert_close(seen, plain, rtol=1e-5, atol=1e-6)
    for a, b in zip(seen_gradients, plain_gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_what_a_pack_cannot_honour_is_refused():
    places = index([0], [3], [4])
    attend(places, sliding_window=7)
    with pytest.raises(UserError, match="sliding window of 6"):
        attend(places, sliding_window=6)
    for option in ("softcap", "s_aux", "position_bias"):
        attend(places, **{option: None})
        with pytest.raises(UserError, match=option):
            attend(places, **{option: 30.0})
