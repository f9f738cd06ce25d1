"""Compiled kernels: the same numbers as torch, whatever the shape; torch where they cannot be built."""

import ctypes
import gc
import logging
import os
import shutil
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from tranship.rollout.native import engine as engine_module
from tranship.rollout.native import kernels as kernels_module
from tranship.rollout.native import model as model_module
from tranship.rollout.native.kernels import Kernels, build, kernels_for
from tranship.rollout.native.linear import CompiledLinear, make_gated
from tranship.rollout.native.mlp import CompiledExperts, PlainExperts, make_routed
from tranship.rollout.native.norm import RmsNorm
from tranship.rollout.native.sampling import RowSampling, draw

CPU = torch.device("cpu")
CPUINFO = Path("/proc/cpuinfo")
FLAGS = CPUINFO.read_text().split() if CPUINFO.exists() else []
GAPS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(scope="module")
def kernels():
    if "avx512f" not in FLAGS:
        pytest.skip("this processor has no AVX-512: the engine uses torch")
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("there is no C++ compiler: install g++, or set CXX")
    # Sources that cannot be built are a failure, not a reason to skip.
    return Kernels(build())


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(made, wanted, dtype):
    assert made.shape == wanted.shape
    assert (made.float() - wanted).abs().max() <= GAPS[dtype] * wanted.abs().max()


@pytest.mark.parametrize("dtype", GAPS)
@pytest.mark.parametrize("rows", [1, 2, 13, 14, 15, 29, 168, 169, 337])
@pytest.mark.parametrize(("inner", "columns"), [(64, 32), (34, 50), (130, 7), (576, 192)])
def test_a_product_is_the_plain_one(kernels, dtype, rows, inner, columns):
    weight, bias = drawn(columns, inner, dtype=dtype), drawn(columns, dtype=dtype, seed=1)
    x, other = drawn(rows, inner, dtype=dtype, seed=2), drawn(rows, columns, dtype=dtype, seed=3)
    if dtype == torch.bfloat16 and "avx512_bf16" not in FLAGS:
        assert not kernels.has_product(weight)
        pytest.skip("this processor does not multiply bf16: the engine uses torch for it")
    assert kernels.has_product(weight)
    linear = CompiledLinear(kernels, weight, bias)
    wanted = x.float() @ weight.float().t() + bias.float()
    close(linear(x), wanted, dtype)
    close(linear.add(x, other), wanted + other.float(), dtype)
    close(linear.wide(x), wanted, torch.float32 if dtype == torch.float32 else dtype)
    assert linear.wide(x).dtype == torch.float32
    assert torch.equal(linear(x)[-1:], linear(x[-1:]))
    # Rows that lie apart.
    assert torch.equal(linear(torch.cat([x, x], 1)[:, :inner]), linear(x))


def test_a_weight_may_lie_in_any_way(kernels):
    weight = drawn(2000, 1000)
    assert torch.equal(kernels.pack(weight.t(), False), kernels.pack(weight.t().contiguous(), False))


def test_as_many_threads_as_torch_would_use(kernels, monkeypatch):
    library = ctypes.CDLL(str(build()))
    for count in (1, 3, torch.get_num_threads()):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        kernels.norm(drawn(2, 16), None, 1e-5)
        assert library.omp_get_max_threads() == count


@pytest.mark.parametrize("dtype", GAPS)
@pytest.mark.parametrize("width", [16, 24, 100])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_gate_and_what_it_gates_are_one_product(kernels, dtype, width, with_bias):
    weight, x = drawn(2 * width, 64, dtype=dtype), drawn(17, 64, dtype=dtype, seed=1)
    bias = drawn(2 * width, dtype=dtype, seed=2) if with_bias else None
    both = x.float() @ weight.float().t() + (0.0 if bias is None else bias.float())
    wanted = torch.nn.functional.silu(both[:, :width]) * both[:, width:]
    for found in (kernels, None):
        close(make_gated(weight, bias, found)(x), wanted, dtype)


@pytest.mark.parametrize("dtype", GAPS)
@pytest.mark.parametrize("dim", [16, 40, 64, 200, 576])
def test_a_norm_is_torchs(kernels, dtype, dim):
    x, weight = drawn(5, 3, dim, dtype=dtype), drawn(3, dim, dtype=dtype, seed=1)
    for part, factor in ((x[:, 0], None), (x[:, 0], weight[0]), (x, weight), (x[:, :2], weight[:2].contiguous())):
        wide = part.float()
        wanted = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        wanted = wanted if factor is None else wanted * factor.float()
        for found in (kernels, None):
            close(RmsNorm(factor, 1e-5, CPU, found)(part), wanted, dtype)


@pytest.mark.parametrize("vocab", [2, 255, 256, 300, 5000])
def test_drawing_is_torchs_up_to_rounding(kernels, vocab):
    count = 400
    logits = drawn(count, vocab) * 4
    seeds, zeros = np.arange(count, dtype=np.uint64), np.zeros(count)
    temperature = np.where(np.arange(count) % 3, 0.7, 0.0)
    how = RowSampling(seeds, zeros.astype(np.int64), temperature, zeros.astype(np.int64), zeros + 1, zeros)
    tokens, logprobs = draw(logits, how, kernels)
    wanted_tokens, wanted = draw(logits, how)
    same = tokens == wanted_tokens
    assert same.mean() > 0.99
    assert same[temperature == 0].all()
    assert np.abs(logprobs - wanted)[same].max() < 1e-5
    logits[7, 1] = float("nan")
    logits[9, 0] = float("inf")
    broken = np.isnan(draw(logits, how, kernels)[1])
    assert np.flatnonzero(broken).tolist() == [7, 9]


def test_frequencies_of_drawn_tokens_are_the_probabilities(kernels):
    logits, count = drawn(1000) * 2, 40000
    zeros = np.zeros(count)
    seeds = np.arange(count, dtype=np.uint64)
    how = RowSampling(seeds, zeros.astype(np.int64), zeros + 1, zeros.astype(np.int64), zeros + 1, zeros)
    tokens, _ = draw(logits.expand(count, -1).contiguous(), how, kernels)
    wanted = torch.softmax(logits.double(), -1).numpy()
    seen = np.bincount(tokens, minlength=1000)
    busy = wanted * count > 20
    error = (seen - wanted * count)[busy] / np.sqrt((wanted * (1 - wanted) * count)[busy])
    assert np.abs(error).max() < 5


@pytest.fixture
def with_and_without(lab, kernels, monkeypatch):
    """Runs requests on an engine with the kernels, and on one without."""

    def run(folder, dtype, *requests):
        done = []
        for found in (kernels, None):
            monkeypatch.setattr(engine_module, "kernels_for", lambda device, dim, found=found: found)
            done.append(lab.run(lab.engine(folder, dtype=dtype, max_running=20), *requests))
        return done

    return run


FAMILIES = ("llama", "qwen3", "qwen3_moe", "deepseek_v3")


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_generates_the_same_without_them(lab, with_and_without, family):
    requests = [lab.group(n, lab.prompt(n, length), temperature=0.0) for n, length in enumerate((5, 16, 70))]
    ours, plain = with_and_without(lab.folder(family), "fp32", *requests)
    for sample, response in ours.items():
        assert response.token_ids.tolist() == plain[sample].token_ids.tolist()
        assert np.abs(response.logprobs - plain[sample].logprobs).max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_is_as_near_to_fp32_as_without_them(lab, with_and_without, family):
    folder = lab.folder(family)
    requests = [lab.group(n, lab.prompt(n, length)) for n, length in enumerate((5, 16, 70))]
    gaps = []
    for done in with_and_without(folder, "bf16", *requests):
        wanted = [lab.reference(folder, requests[r.sample.group_id].prompt_ids, r.token_ids) for r in done.values()]
        made = [response.logprobs for response in done.values()]
        gaps.append(np.abs(np.concatenate(made) - np.concatenate(wanted)).mean())
    assert gaps[0] < 1.3 * gaps[1]


BY_HEADS = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("qwen3_moe", {}),
    ("qwen3_moe", {"norm_topk_prob": True, "num_experts_per_tok": 1}),
    ("qwen3_moe", {"mlp_only_layers": [1], "attention_bias": True}),
]


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(("family", "config"), BY_HEADS)
def test_a_step_in_one_call_is_that_by_layers_to_the_bit(
    lab, kernels, threads, monkeypatch, family, config, count, dtype
):
    threads(count)
    folder = lab.folder(family, tied=False, **config)
    requests = [lab.group(n, lab.prompt(n, length), count=5) for n, length in enumerate((1, 16, 70))]
    engine = lab.engine(folder, dtype=dtype, max_running=15)
    in_one_call = engine._model._ready.step is not None
    experts = engine._shape.experts is not None
    names = ("qkv", "o", "router") if experts else ("qkv", "o", "down")
    assert in_one_call == all(kernels.has_product(engine.storage(f"layers.0.{name}")) for name in names)
    made = lab.run(engine, *requests)
    monkeypatch.setattr(model_module, "compiled_step", lambda *arguments: None)
    by_layers = lab.run(lab.engine(folder, dtype=dtype, max_running=15), *requests)
    assert made.keys() == by_layers.keys()
    for sample, response in made.items():
        assert response.token_ids.tolist() == by_layers[sample].token_ids.tolist()
        assert response.logprobs.tobytes() == by_layers[sample].logprobs.tobytes()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_what_is_held_of_the_cache_goes_when_the_engine_sleeps(lab, kernels, monkeypatch, family, compiled):
    monkeypatch.setattr(engine_module, "kernels_for", lambda device, dim: kernels if compiled else None)
    engine = lab.engine(lab.folder(family))
    lab.run(engine, lab.group(0, lab.prompt(0, 20)))
    tables = engine._batch._responses, engine._batch._prompts.table
    held = [weakref.ref(memory.untyped_storage()) for table in tables for memory in table._memory]
    assert held
    engine.sleep()
    gc.collect()
    assert not any(one() is not None for one in held)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_latents_go_by_layers(lab, kernels, family):
    assert lab.engine(lab.folder(family))._model._ready.step is None


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize(("rows", "experts", "chosen"), [(1, 1, 1), (7, 8, 8), (40, 17, 3), (3000, 128, 8)])
def test_a_router_chooses_the_largest_of_a_softmax(kernels, rows, experts, chosen, normalised):
    logits = 3 * drawn(rows, experts)
    share_NK, chosen_NK = torch.softmax(logits, -1).topk(chosen, -1)
    if normalised:
        share_NK = share_NK / share_NK.sum(-1, keepdim=True)
    made, shares = kernels.route(logits, chosen, normalised=normalised, scale=1.5)
    assert torch.equal(made, chosen_NK)
    assert torch.allclose(shares, 1.5 * share_NK, rtol=1e-5, atol=1e-9)


def test_a_router_chooses_different_experts_whatever_it_is_given(kernels):
    logits = torch.zeros(4, 9)
    logits[1, 3], logits[2, :] = float("nan"), float("-inf")
    logits[3, 2] = float("inf")
    chosen, shares = kernels.route(logits, 4, normalised=True, scale=1.0)
    assert all(len(set(row)) == 4 and min(row) >= 0 and max(row) < 9 for row in chosen.tolist())
    assert chosen[0].tolist() == [0, 1, 2, 3]
    assert shares[0].tolist() == [0.25] * 4
    assert shares[1:].isnan().any(1).all(), "what is not finite stays so"


@pytest.mark.parametrize("dtype", GAPS)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("rows", "experts", "chosen", "hidden", "mlp"),
    [(1, 8, 2, 64, 32), (5, 3, 3, 34, 18), (40, 16, 4, 64, 48), (300, 4, 1, 128, 64), (33, 64, 8, 128, 30)],
)
def test_experts_in_one_call_make_what_they_make_one_by_one(
    kernels, threads, dtype, count, rows, experts, chosen, hidden, mlp
):
    threads(count)
    gate_up = drawn(experts, 2 * mlp, hidden, dtype=dtype) / hidden**0.5
    down = drawn(experts, hidden, mlp, dtype=dtype, seed=1) / mlp**0.5
    x, scores = drawn(rows, hidden, dtype=dtype, seed=2), drawn(rows, experts, seed=3)
    # Few rows go to the last expert, and none to the first of many.
    scores[:, 0] -= 9.0 * (experts > chosen)
    scores[:, -1] -= 1.0
    share_NK, chosen_NK = torch.softmax(scores, -1).topk(chosen, -1)
    routed = make_routed(gate_up, down, kernels)
    is_compiled = dtype == torch.float32 or "avx512_bf16" in FLAGS
    assert isinstance(routed, CompiledExperts if is_compiled else PlainExperts)
    made = routed(x, chosen_NK, share_NK)
    assert made.dtype == torch.float32
    close(made, make_routed(gate_up.float(), down.float(), None)(x.float(), chosen_NK, share_NK), dtype)
    for row in {0, rows // 2, rows - 1} if is_compiled else ():
        alone = routed(x[row : row + 1], chosen_NK[row : row + 1], share_NK[row : row + 1])
        assert torch.equal(alone[0], made[row]), "a row's result depends on the rows beside it"


@pytest.mark.parametrize("prompt", [1, 15, 16, 17, 200])
def test_long_and_short_prompts_and_responses(lab, kernels, prompt):
    requests = [lab.group(n, lab.prompt(n, prompt + n), count=9, max_response_tokens=70) for n in range(2)]
    for response in lab.run(lab.engine(max_running=20), *requests).values():
        text = lab.prompt(response.sample.group_id, prompt + response.sample.group_id)
        wanted = lab.reference(lab.folder(), text, response.token_ids)
        assert np.abs(response.logprobs - wanted).max() < 1e-4


def test_without_a_compiler_torch_computes_and_a_warning_says_so(kernels, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("TRANSHIP_CACHE", str(tmp_path))
    kernels_module._built.cache_clear()
    try:
        for compiler, said in (("no-such-compiler", "install g"), ("false", "cannot build")):
            monkeypatch.setenv("CXX", compiler)
            kernels_module._built.cache_clear()
            with caplog.at_level(logging.WARNING):
                assert kernels_for(CPU, 64) is None
            assert said in caplog.text
    finally:
        kernels_module._built.cache_clear()


def test_other_devices_and_sizes_are_left_to_torch(kernels):
    assert kernels_for(torch.device("meta"), 64) is None
    assert kernels_for(CPU, 40) is None
