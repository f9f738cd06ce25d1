"""Deterministic mode: a sample's tokens and log-probs are the same, to the bit, whatever runs beside it."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tranship.rollout.native.linear import PackedLinear
from tranship.types import SampleId, UserError

TARGETS = (2, 12, 61)
"""Lengths of the prompts of groups 0, 1, 2."""
CAP = 90
"""With the longest prompt this crosses a block of the cache."""


@pytest.fixture(scope="module")
def alone(lab):
    """Each sample of groups 0 to 2, run with nothing beside it."""
    done = {}
    for group, length in enumerate(TARGETS):
        for index in range(3):
            engine = lab.engine(deterministic=True, max_running=1)
            request = lab.group(group, lab.prompt(group, length), count=1, first=index, max_response_tokens=CAP)
            done |= lab.run(engine, request)
    return done


def same(alone, done):
    checked = 0
    for sample, response in done.items():
        if sample in alone:
            assert np.array_equal(response.token_ids, alone[sample].token_ids), sample
            assert np.array_equal(response.logprobs, alone[sample].logprobs), sample
            checked += 1
    return checked


def neighbour(lab, group, length, cap, count=2, **sampling):
    return lab.group(group, lab.prompt(group, length), count=count, max_response_tokens=cap, **sampling)


def target(lab, group, **settings):
    return lab.group(group, lab.prompt(group, TARGETS[group]), count=3, max_response_tokens=CAP, **settings)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize("slots", [1, 2, 3, 17])
def test_batches_of_other_sizes(lab, alone, slots):
    engine = lab.engine(deterministic=True, max_running=slots)
    assert engine.capabilities.deterministic
    done = lab.run(engine, *(target(lab, group) for group in range(3)))
    assert same(alone, done) == 9


def test_other_neighbours_and_orders(lab, alone):
    engine = lab.engine(deterministic=True, max_running=17)
    others = [
        neighbour(lab, 10, 90, 200, temperature=0.0),
        neighbour(lab, 11, 1, 3, top_p=0.8),
        neighbour(lab, 12, 130, 20, temperature=1.7),
    ]
    requests = [others[0], target(lab, 2), others[1], target(lab, 0), others[2], target(lab, 1)]
    assert same(alone, lab.run(engine, *requests)) == 9


def test_later_arrivals(lab, alone):
    engine = lab.engine(deterministic=True, max_running=17)
    done = {}
    for group in (10, 11, 12, 13):
        engine.submit(neighbour(lab, group, 7 * (group - 8), 40))
    for group in (1, 0, 2):
        for _ in range(13):
            done |= {response.sample: response for response in engine.step()}
        engine.submit(target(lab, group))
    assert same(alone, done | lab.run(engine)) == 9


@pytest.mark.parametrize("with_partials", [False, True])
def test_after_an_abort(lab, alone, with_partials):
    engine = lab.engine(deterministic=True, max_running=17)
    engine.submit(neighbour(lab, 10, 33, 100))
    engine.submit(target(lab, 1))
    engine.submit(target(lab, 2))
    for _ in range(70):
        engine.step()
    engine.submit(neighbour(lab, 11, 50, 30))
    stopped = {response.sample: response for response in engine.abort([SampleId(1, 0), SampleId(2, 1), SampleId(2, 2)])}
    assert all(len(response.token_ids) == 71 for response in stopped.values())
    partials = stopped if with_partials else None
    engine.submit(lab.group(1, lab.prompt(1, TARGETS[1]), 1, partials=partials, max_response_tokens=CAP))
    engine.submit(lab.group(2, lab.prompt(2, TARGETS[2]), 2, partials=partials, first=1, max_response_tokens=CAP))
    assert same(alone, lab.run(engine)) == 6


def test_whatever_the_process_set_for_products(lab, alone):
    torch.set_float32_matmul_precision("medium")
    try:
        engine = lab.engine(deterministic=True, max_running=9)
        assert same(alone, lab.run(engine, *(target(lab, group) for group in range(3)))) == 9
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_history(lab, alone, data):
    """Random neighbours, arrivals, aborts and resubmissions of one group."""
    engine = lab.engine(deterministic=True, max_running=data.draw(st.integers(1, 12)))
    group = data.draw(st.integers(0, 2))
    engine.submit(target(lab, group))
    done = {}
    for name in range(20, 20 + data.draw(st.integers(1, 4))):
        length, cap = data.draw(st.integers(1, 120)), data.draw(st.integers(1, 60))
        engine.submit(neighbour(lab, name, length, cap, data.draw(st.integers(1, 5))))
        for _ in range(data.draw(st.integers(0, 40))):
            done |= {response.sample: response for response in engine.step()}
        victims = [SampleId(group, index) for index in range(3) if data.draw(st.booleans())]
        stopped = {response.sample: response for response in engine.abort(victims)}
        for sample in stopped:
            partials = stopped if data.draw(st.booleans()) else None
            prompt = lab.prompt(group, TARGETS[group])
            engine.submit(
                lab.group(group, prompt, 1, partials=partials, first=sample.sample_index, max_response_tokens=CAP)
            )
    assert same(alone, done | lab.run(engine)) == 3


@pytest.mark.parametrize("inner", [16, 96, 576, 1536, 3072])
def test_packed_products_have_independent_rows(inner):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(130, inner), torch.randn(40, inner), torch.randn(40)
    other = torch.randn(130, 40)
    linear = PackedLinear(weight, bias)
    for product in (linear, linear.silu, lambda x: linear.add(x, other[: len(x)])):
        whole = product(x)
        for rows in (1, 2, 3, 7, 8, 16, 17, 31, 64, 65, 128):
            assert torch.equal(product(x[:rows]), whole[:rows]), rows
    assert torch.equal(linear(x[77:79]), linear(x)[77:79])
    assert torch.allclose(linear(x), torch.nn.functional.linear(x, weight, bias), atol=1e-3)


def test_deterministic_is_refused_where_it_cannot_hold(lab):
    with pytest.raises(UserError, match="not bf16"):
        lab.engine(deterministic=True, dtype="bf16", load=False)
    torch.set_num_threads(2)
    with pytest.raises(UserError, match="1 thread, not fp32, cpu and 2"):
        lab.engine(deterministic=True, load=False)
    assert not lab.engine(load=False).capabilities.deterministic


@pytest.mark.parametrize("heads", [(2, 1), (6, 1), (3, 3)], ids=str)
def test_models_whose_products_come_in_batches_of_one(lab, heads):
    """Keys and values that lie in a batch of one are multiplied as those in larger batches are."""
    folder = lab.folder(num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=32)
    requests = [target(lab, group) for group in range(2)]
    alone = {}
    for request in requests:
        for index, sample in enumerate(request.samples):
            one = type(request)(request.prompt_ids, (sample,), request.seeds[index : index + 1], request.sampling)
            alone |= lab.run(lab.engine(folder, deterministic=True, max_running=1), one)
    together = lab.run(lab.engine(folder, deterministic=True, max_running=5), *requests)
    assert same(alone, together) == 6
