from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.unit.train.plain import assert_same_gradients, gradients_of, padded, plain_logprobs
from tranship.algorithms.objective import make_loss
from tranship.config.schema import AlgorithmConfig, KlConfig
from tranship.train.engine import LossInputs, Totals
from tranship.types import RunError, UserError

FAMILIES = ["llama-tied", "llama", "qwen2", "qwen3"]
MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def plain_gradients(folder, batch, algorithm, temperature):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    mask = padded(batch.response_mask)
    inputs = LossInputs(
        plain_logprobs(model, batch, temperature),
        padded(batch.logprobs),
        padded(batch.advantages),
        mask,
        padded(batch.ref_logprobs),
    )
    loss, metrics = make_loss(algorithm)(inputs, Totals(int(mask.sum()), int(mask.any(-1).sum()), 12))
    loss.backward()
    return loss.item(), gradients_of(model), metrics


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("microbatch_tokens", [1, 25, 40, 4096])
def test_every_gradient_equals_the_padded_one(make_engine, model_folders, captured, batch, family, microbatch_tokens):
    algorithm = AlgorithmConfig(kl=KlConfig(coef=0.1), dual_clip=3.0)
    engine = make_engine(family, temperature=0.7, microbatch_tokens=microbatch_tokens)
    seen = engine.update(batch, make_loss(algorithm))
    loss, gradients, metrics = plain_gradients(model_folders[family], batch, algorithm, 0.7)
    assert_same_gradients(captured[0], gradients)
    assert seen["loss"] == pytest.approx(loss, rel=1e-5)
    for name, (total, weight) in metrics.items():
        assert seen[name] == pytest.approx(total / weight, rel=1e-4, abs=1e-6), name
    assert seen["num_tokens"] == sum(int(m.sum()) for m in batch.response_mask)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("microbatch_tokens", [25, 4096])
def test_every_aggregation_has_one_normaliser(make_engine, model_folders, captured, batch, mode, microbatch_tokens):
    algorithm = AlgorithmConfig(aggregation=mode)
    make_engine(microbatch_tokens=microbatch_tokens).update(batch, make_loss(algorithm))
    assert_same_gradients(captured[0], plain_gradients(model_folders["llama-tied"], batch, algorithm, 1.0)[1])


def test_activation_checkpointing_changes_no_gradient(make_engine, captured, batch):
    for checkpointing in (False, True):
        make_engine(activation_checkpointing=checkpointing).update(batch, make_loss(AlgorithmConfig()))
    assert_same_gradients(captured[1], captured[0], 1e-6)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("microbatch_tokens", [1, 30, 4096])
def test_logprobs_equal_a_plain_forward(make_engine, model_folders, batch, family, microbatch_tokens):
    engine = make_engine(family, temperature=1.3, microbatch_tokens=microbatch_tokens)
    seen = engine.logprobs(batch.prompts, batch.group_of, batch.responses)
    model = AutoModelForCausalLM.from_pretrained(model_folders[family], dtype=torch.float32)
    with torch.no_grad():
        plain = plain_logprobs(model, batch, 1.3).numpy()
    for row, values in enumerate(seen):
        assert values.dtype == np.float32
        np.testing.assert_allclose(values, plain[row, : len(values)], atol=1e-5)


def test_rows_do_not_see_their_neighbours(make_engine, batch):
    engine = make_engine()
    before = engine.logprobs(batch.prompts, batch.group_of, batch.responses)
    changed = [r if row == 2 else (r + 1) % 97 for row, r in enumerate(batch.responses)]
    prompts = [p if g == batch.group_of[2] else (p + 5) % 97 for g, p in enumerate(batch.prompts)]
    after = engine.logprobs(prompts, batch.group_of, changed)
    np.testing.assert_allclose(after[2], before[2], atol=1e-6)
    others = [row for row in range(len(before)) if row != 2]
    assert all(np.abs(after[row] - before[row]).max() > 1e-3 for row in others)


def test_empty_responses_have_no_logprobs(make_engine, batch):
    responses = [np.zeros(0, dtype=np.int32) if row % 2 else r for row, r in enumerate(batch.responses)]
    engine = make_engine()
    seen = engine.logprobs(batch.prompts, batch.group_of, responses)
    assert [len(x) for x in seen] == [len(r) for r in responses]
    nothing = engine.logprobs(batch.prompts, batch.group_of, [r[:0] for r in responses])
    assert all(len(x) == 0 for x in nothing)


def test_temperature_zero_reports_log_probs_at_one(make_engine, batch):
    one, zero = (make_engine(temperature=t).logprobs(batch.prompts, batch.group_of, batch.responses) for t in (1, 0))
    for a, b in zip(one, zero, strict=True):
        np.testing.assert_array_equal(a, b)


def test_minibatches_are_steps_over_groups_in_order(make_engine, captured, batch):
    engine = make_engine(minibatches=2)
    engine.update(batch, make_loss(AlgorithmConfig()))
    assert len(captured) == 2
    first = [row for row, group in enumerate(batch.group_of) if group < 2]
    part = replace(
        batch,
        samples=[batch.samples[row] for row in first],
        prompts=batch.prompts[:2],
        group_of=batch.group_of[first],
        **{
            key: [getattr(batch, key)[row] for row in first]
            for key in ("responses", "response_mask", "logprobs", "advantages", "ref_logprobs")
        },
    )
    make_engine().update(part, make_loss(AlgorithmConfig()))
    assert_same_gradients(captured[0], captured[2], 1e-6)


def test_a_batch_without_an_unmasked_token_changes_nothing(make_engine, batch):
    engine = make_engine(optimizer={"weight_decay": 0.5})
    engine.update(batch, make_loss(AlgorithmConfig()))
    before = {piece.name: engine.storage(piece.storage).clone() for piece in engine.pieces()}
    masked = replace(batch, response_mask=[np.zeros_like(m) for m in batch.response_mask])
    seen = engine.update(masked, make_loss(AlgorithmConfig()))
    assert (seen["loss"], seen["grad_norm"], seen["num_tokens"]) == (0, 0, 0)
    assert all(torch.equal(engine.storage(name), value) for name, value in before.items())


@pytest.mark.parametrize("field", ["advantages", "logprobs"])
def test_a_gradient_that_is_not_finite_stops_before_the_weights_change(make_engine, batch, field):
    engine = make_engine()
    before = {piece.name: engine.storage(piece.storage).clone() for piece in engine.pieces()}
    values = [x.copy() for x in getattr(batch, field)]
    values[0][0] = np.nan
    with pytest.raises(RunError, match="not finite"):
        engine.update(replace(batch, **{field: values}), make_loss(AlgorithmConfig()))
    assert all(torch.equal(engine.storage(name), value) for name, value in before.items())
    engine.update(batch, make_loss(AlgorithmConfig()))
    assert all(engine.storage(name).isfinite().all() for name in before)


@pytest.mark.parametrize("where", ["fence", "loss"])
def test_what_the_fence_or_the_loss_raises_leaves_the_weights_and_no_gradient(make_engine, captured, batch, where):
    engine = make_engine(microbatch_tokens=30)
    before = {piece.name: engine.storage(piece.storage).clone() for piece in engine.pieces()}
    loss, calls = make_loss(AlgorithmConfig()), []

    def stop(*_):
        calls.append(1)
        if where == "fence" or len(calls) == 2:
            raise LookupError("the lease is gone")
        return loss(*_)

    with pytest.raises(LookupError, match="the lease is gone"):
        engine.update(batch, stop if where == "loss" else loss, stop if where == "fence" else lambda: None)
    assert all(torch.equal(engine.storage(name), value) for name, value in before.items())
    engine.update(batch, loss)
    make_engine(microbatch_tokens=30).update(batch, loss)
    assert_same_gradients(captured[-2], captured[-1], 0)


def test_the_fence_comes_before_each_step(make_engine, batch):
    calls = []
    make_engine(minibatches=2).update(batch, make_loss(AlgorithmConfig()), lambda: calls.append(1))
    assert len(calls) == 2


def test_two_deterministic_runs_are_bit_equal(make_engine, batch):
    weights = []
    for _ in range(2):
        engine = make_engine(microbatch_tokens=30, minibatches=2)
        for _ in range(3):
            engine.update(batch, make_loss(AlgorithmConfig()))
        weights.append([engine.storage(piece.storage).clone() for piece in engine.pieces()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_training_raises_the_log_probs_of_good_samples(make_engine, batch):
    engine = make_engine(optimizer={"learning_rate": 3e-3})
    mask = [np.ones_like(m) for m in batch.response_mask]
    good = np.arange(len(batch)) % 2 == 0
    advantages = [np.full(len(m), 1.0 if g else -1.0, dtype=np.float32) for g, m in zip(good, mask, strict=True)]

    def mean_of(rows):
        values = engine.logprobs(batch.prompts, batch.group_of, batch.responses)
        return np.mean([values[row].mean() for row in np.flatnonzero(rows)])

    before = mean_of(good), mean_of(~good)
    for _ in range(5):
        logprobs = engine.logprobs(batch.prompts, batch.group_of, batch.responses)
        trained = replace(batch, response_mask=mask, logprobs=logprobs, advantages=advantages)
        seen = engine.update(trained, make_loss(AlgorithmConfig()))
        assert seen["ratio_mean"] == pytest.approx(1, abs=1e-5)
        assert seen["approx_kl"] == pytest.approx(0, abs=1e-5)
    assert mean_of(good) > before[0] + 0.05
    assert mean_of(~good) < before[1] - 0.05


def test_bf16_is_close_to_fp32_and_keeps_fp32_weights(make_engine, captured, batch):
    for precision in ("fp32", "bf16"):
        engine = make_engine(deterministic=False, precision=precision)
        engine.update(batch, make_loss(AlgorithmConfig()))
    assert {piece.dtype for piece in engine.pieces()} == {"float32"}
    for name, exact in captured[0].items():
        assert (captured[1][name] - exact).norm() / exact.norm() < 0.1, name


def test_the_process_keeps_its_matmul_precision(make_engine, batch):
    before = torch.get_float32_matmul_precision()
    make_engine().update(batch, make_loss(AlgorithmConfig()))
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"threads": 2}])
def test_deterministic_is_refused_where_it_cannot_be_kept(make_engine, options):
    torch.set_num_threads(options.pop("threads", 1))
    with pytest.raises(UserError, match="deterministic"):
        make_engine(deterministic=True, **options)


@pytest.mark.parametrize(("family", "tied"), [("llama-tied", True), ("llama", False)])
def test_pieces_name_each_element_once(make_engine, family, tied):
    engine = make_engine(family)
    pieces = {piece.name: piece for piece in engine.pieces()}
    assert ("lm_head.weight" in pieces) != tied
    assert "model.embed_tokens.weight" in pieces
    assert engine.num_parameters == sum(engine.storage(p.storage).numel() for p in pieces.values())
    for piece in pieces.values():
        assert tuple(engine.storage(piece.storage).shape) == piece.shape
        assert piece.box == piece.storage_box


def test_a_row_beyond_the_sliding_window_is_refused(model_folders, make_engine, batch):
    engine = make_engine()
    for layer in engine._model.base_model.layers:
        attention = layer.self_attn
        forward = attention.forward
        attention.forward = lambda *args, _forward=forward, **kwargs: _forward(*args, sliding_window=6, **kwargs)
    with pytest.raises(UserError, match="sliding window of 6"):
        engine.logprobs(batch.prompts, batch.group_of, batch.responses)
