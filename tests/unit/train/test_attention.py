import numpy as np
import pytest
import torch

from tranship.train import row_attention as rows
from tranship.train.attention import packed_attention, sdpa_attention
from tranship.train.packing import pack, rows_by_prompt
from tranship.train.row_attention import row_attention
from tranship.types import UserError

CPU = torch.device("cpu")
SHAPES = {
    "ragged": ([0, 1, 1, 0, 1], [3, 5], [4, 1, 7, 2, 3]),
    "one token": ([0], [1], [1]),
    "nothing": ([0, 0], [2], [0, 5]),
    "several blocks": ([0, 1, 0, 1, 2], [40, 3, 21], [60, 30, 59, 12, 1]),
}


def index(group_of, prompt_lengths, response_lengths):
    prompts = [np.zeros(n, dtype=np.int32) for n in prompt_lengths]
    responses = [np.zeros(n, dtype=np.int32) for n in response_lengths]
    shares = rows_by_prompt(len(prompts), np.array(group_of))
    return pack(shares, prompts, responses, wanted=None, device=CPU).attention


def states(places, heads=6, kv_heads=2, value_size=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    tokens = len(places.inverse)
    return [
        torch.randn(tokens, n, size, generator=generator).to(dtype).requires_grad_()
        for n, size in ((heads, 8), (kv_heads, 8), (kv_heads, value_size))
    ]


def values_and_gradients(attend, places, inputs):
    attended = attend(*inputs, places, 0.3)
    weights = torch.linspace(-1, 1, attended.numel()).view(attended.shape)
    return attended, torch.autograd.grad((attended * weights).sum(), inputs)


@pytest.mark.parametrize("limits", [(1 << 20, 192, 128), (1 << 20, 4, 3), (800, 4, 3), (4, 192, 128)])
@pytest.mark.parametrize(("kv_heads", "value_size"), [(1, 8), (2, 8), (6, 8), (2, 5)])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_batched_products_equal_sdpa(monkeypatch, limits, kv_heads, value_size, shape):
    for name, limit in zip(("MAX_SCORE_BYTES", "MAX_QUERIES", "QUERY_STEP"), limits, strict=True):
        monkeypatch.setattr(rows, name, limit)
    places = index(*shape)
    inputs = states(places, kv_heads=kv_heads, value_size=value_size)
    seen, seen_gradients = values_and_gradients(row_attention, places, inputs)
    plain, plain_gradients = values_and_gradients(sdpa_attention, places, inputs)
    torch.testing.assert_close(seen, plain, rtol=1e-5, atol=1e-5)
    for a, b in zip(seen_gradients, plain_gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_bf16_inputs_give_bf16_results_of_float32_arithmetic():
    places = index(*SHAPES["ragged"])
    rough = states(places, dtype=torch.bfloat16)
    exact = [x.detach().float().requires_grad_() for x in rough]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        seen, seen_gradients = values_and_gradients(row_attention, places, rough)
    plain, plain_gradients = values_and_gradients(row_attention, places, exact)
    assert torch.equal(seen, plain.bfloat16())
    for a, b in zip(seen_gradients, plain_gradients, strict=True):
        assert a.dtype == torch.bfloat16
        torch.testing.assert_close(a.float(), b, rtol=0.02, atol=0.02)


def test_rows_of_like_length_share_a_block():
    lengths = [[tuple(block.queries.shape) for block in index(*SHAPES[name]).blocks] for name in SHAPES]
    assert lengths == [
        [(2, 5), (4, 6)],
        [(1, 1)],
        [(1, 2), (1, 4)],
        [(1, 40), (1, 21), (1, 3), (2, 59), (1, 29), (1, 11)],
    ]


def test_what_a_pack_cannot_honour_is_refused():
    places = index([0], [3], [4])
    inputs = [x.transpose(0, 1)[None] for x in states(places)]

    def attend(**options):
        return packed_attention(torch.nn.Module(), *inputs, None, packed_index=places, **options)

    assert attend(sliding_window=6)[0].shape == (1, 6, 6, 8)
    with pytest.raises(UserError, match="sliding window of 5"):
        attend(sliding_window=5)
    for option in ("softcap", "s_aux", "position_bias"):
        attend(**{option: None})
        with pytest.raises(UserError, match=option):
            attend(**{option: 30.0})
