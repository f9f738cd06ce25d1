"""What every training engine and every critic of the tables promise, whatever they are made of."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from tranship.algorithms.objective import make_loss
from tranship.config.schema import AlgorithmConfig, CriticConfig, OptimizerConfig, TrainConfig
from tranship.layouts.pieces import box_size
from tranship.lookup import resolve
from tranship.train import CRITIC_ENGINES, TRAIN_ENGINES
from tranship.types import RunError, SampleId, TrainBatch, UserError

ENGINES = sorted(TRAIN_ENGINES)
LOSS = make_loss(AlgorithmConfig())


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(params=ENGINES)
def make(request, folder):
    def build(**train):
        config = TrainConfig(**{"steps": 5, "optimizer": OptimizerConfig(learning_rate=1e-2), **train})
        return resolve(request.param, TRAIN_ENGINES, "train.engine")(
            folder,
            config=config,
            temperature=1.0,
            max_response_tokens=8,
            num_steps=5,
            device="cpu",
            seed=0,
            deterministic=True,
        )

    return build


def make_batch(engine=None, seed=0):
    generator = np.random.default_rng(seed)
    prompts = [generator.integers(0, 61, n, dtype=np.int32) for n in (4, 7)]
    group_of = np.array([0, 1, 1, 0, 1])
    responses = [generator.integers(0, 61, n, dtype=np.int32) for n in (3, 8, 1, 5, 2)]
    zeros = [np.zeros(len(r), dtype=np.float32) for r in responses]
    return TrainBatch(
        samples=[SampleId(int(g), i) for i, g in enumerate(group_of)],
        prompts=prompts,
        group_of=group_of,
        responses=responses,
        response_mask=[np.ones(len(r), dtype=bool) for r in responses],
        logprobs=engine.logprobs(prompts, group_of, responses) if engine else zeros,
        advantages=[
            np.full(len(r), a, dtype=np.float32) for a, r in zip((1, -1, 0.5, -0.5, 1), responses, strict=True)
        ],
    )


def weights(engine):
    return {piece.name: engine.storage(piece.storage).clone() for piece in engine.pieces()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_update_trains_and_reports(make):
    engine = make()
    batch = make_batch(engine)
    before = weights(engine)
    seen = engine.update(batch, LOSS)
    assert not same(before, weights(engine))
    assert {"loss", "grad_norm", "learning_rate", "num_tokens", "tokens_per_s", "clip_frac"} <= seen.keys()
    assert all(isinstance(value, float) and np.isfinite(value) for value in seen.values())
    assert seen["num_tokens"] == 19
    assert seen["ratio_mean"] == pytest.approx(1, abs=1e-5)
    after = engine.logprobs(batch.prompts, batch.group_of, batch.responses)
    gains = [np.sign(a[0]) * (x - y).mean() for a, x, y in zip(batch.advantages, after, batch.logprobs, strict=True)]
    assert np.mean(gains) > 0


def test_the_size_of_a_microbatch_does_not_change_the_update(make):
    results = []
    for tokens in (1, 12, 4096):
        engine = make(microbatch_tokens=tokens)
        engine.update(make_batch(engine), LOSS)
        results.append(engine.logprobs(*reads(make_batch())))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-4)


def reads(batch):
    return batch.prompts, batch.group_of, batch.responses


def test_logprobs_are_those_of_a_distribution(make):
    engine = make()
    prompt = [np.array([3, 5], dtype=np.int32)]
    every = [np.array([token], dtype=np.int32) for token in range(61)]
    values = engine.logprobs(prompt, np.zeros(61, dtype=np.int64), every)
    assert all(v.dtype == np.float32 and v.shape == (1,) for v in values)
    assert sum(float(np.exp(v[0])) for v in values) == pytest.approx(1, abs=1e-5)


def test_pieces_cover_every_parameter_once_and_show_the_current_weights(make):
    engine = make()
    pieces = engine.pieces()
    assert sum(box_size(piece.box) for piece in pieces) == engine.num_parameters
    assert len({piece.name for piece in pieces}) == len(pieces)
    live = {piece.name: engine.storage(piece.storage) for piece in pieces}
    for piece in pieces:
        assert str(live[piece.name].dtype) == f"torch.{piece.dtype}"
        assert not live[piece.name].requires_grad
    engine.update(make_batch(engine), LOSS)
    assert same(live, weights(engine))


def test_saved_state_continues_bit_for_bit(make, tmp_path):
    engine = make()
    engine.update(make_batch(engine), LOSS)
    engine.save(tmp_path)
    other = make()
    other.load(tmp_path)
    assert same(weights(engine), weights(other))
    for one in (engine, other):
        one.update(make_batch(seed=1), LOSS)
    assert same(weights(engine), weights(other))


def test_a_folder_that_is_no_checkpoint_is_refused(make, tmp_path):
    with pytest.raises(UserError, match=str(tmp_path)):
        make().load(tmp_path)


def test_the_exported_folder_holds_the_weights(make, tmp_path):
    engine = make()
    engine.update(make_batch(engine), LOSS)
    engine.export(tmp_path)
    exported = load_file(tmp_path / "model.safetensors")
    assert same(exported, weights(engine))


def test_a_fence_that_raises_leaves_the_weights(make):
    engine = make()
    before = weights(engine)

    def closed():
        raise LookupError("gone")

    with pytest.raises(LookupError):
        engine.update(make_batch(), LOSS, fence=closed)
    assert same(before, weights(engine))


def test_a_nan_stops_before_the_weights_change(make):
    engine = make()
    before = weights(engine)
    batch = make_batch()
    batch.advantages[1][2] = np.nan
    with pytest.raises(RunError, match="not finite"):
        engine.update(batch, LOSS)
    assert same(before, weights(engine))


class Compared:
    """A loss that needs entropies and whole groups, and keeps its inputs."""

    needs_entropy = True
    whole_groups = True

    def __init__(self):
        self.seen = []

    def __call__(self, inputs, totals):
        self.seen.append((inputs, totals))
        loss = torch.where(inputs.mask_BT, inputs.entropy_BT - inputs.logprobs_BT, 0).sum() / totals.num_tokens
        return loss, {}


def test_a_loss_gets_the_entropies_and_the_whole_groups_that_it_asks_for(make):
    engine = make(microbatch_tokens=1)
    before = weights(engine)
    loss = Compared()
    engine.update(make_batch(), loss)
    assert [sorted(inputs.group_B.tolist()) for inputs, _ in loss.seen] == [[0, 0], [1, 1, 1]]
    for inputs, totals in loss.seen:
        entropies = inputs.entropy_BT[inputs.mask_BT]
        assert ((entropies > 0) & (entropies < np.log(61))).all()
        assert inputs.entropy_BT.shape == inputs.logprobs_BT.shape
        assert (totals.num_tokens, totals.num_sequences, totals.num_groups) == (19, 5, 2)
    assert not same(before, weights(engine))


@pytest.fixture(params=sorted(CRITIC_ENGINES))
def make_critic(request, folder):
    def build(**train):
        return resolve(request.param, CRITIC_ENGINES, "train.engine")(
            folder,
            config=TrainConfig(**{"steps": 5, **train}),
            critic=CriticConfig(optimizer=OptimizerConfig(learning_rate=1e-2)),
            max_response_tokens=8,
            num_steps=5,
            device="cpu",
            seed=0,
            deterministic=True,
        )

    return build


def value_batch(seed=0):
    batch = make_batch(seed=seed)
    batch.values = [np.zeros(len(r), dtype=np.float32) for r in batch.responses]
    batch.returns = [
        np.full(len(r), g - 0.5, dtype=np.float32) for g, r in zip(batch.group_of, batch.responses, strict=True)
    ]
    return batch


def value_loss(inputs, totals):
    errors = torch.where(inputs.mask_BT, (inputs.values_BT - inputs.returns_BT).square(), 0)
    return errors.sum() / totals.num_tokens, {"error": (float(errors.detach().sum()), float(inputs.mask_BT.sum()))}


def values_of(critic):
    return np.concatenate(critic.values(*reads(make_batch())))


def test_a_critic_begins_at_0_learns_and_reports_under_its_own_names(make_critic):
    critic = make_critic(microbatch_tokens=12)
    first = critic.values(*reads(make_batch()))
    assert [v.shape for v in first] == [r.shape for r in make_batch().responses]
    assert all(v.dtype == np.float32 and not v.any() for v in first)
    seen = [critic.update(value_batch(), value_loss) for _ in range(20)]
    assert seen[0].keys() == {"critic_value_loss", "critic_error", "critic_grad_norm", "critic_learning_rate"}
    assert seen[0]["critic_error"] == pytest.approx(0.25)
    assert seen[-1]["critic_error"] < 0.1


def test_the_size_of_a_microbatch_does_not_change_a_critics_update(make_critic):
    results = []
    for tokens in (1, 12, 4096):
        critic = make_critic(microbatch_tokens=tokens)
        for _ in range(2):
            critic.update(value_batch(), value_loss)
        results.append(values_of(critic))
    assert np.abs(results[0]).max() > 1e-3
    for other in results[1:]:
        np.testing.assert_allclose(results[0], other, atol=1e-4)


def test_a_saved_critic_continues_bit_for_bit(make_critic, tmp_path):
    critic = make_critic()
    critic.update(value_batch(), value_loss)
    critic.save(tmp_path)
    other = make_critic()
    other.load(tmp_path)
    for one in (critic, other):
        one.update(value_batch(seed=1), value_loss)
    np.testing.assert_array_equal(values_of(critic), values_of(other))


def test_a_folder_that_is_no_critics_checkpoint_is_refused(make_critic, tmp_path):
    with pytest.raises(UserError, match=str(tmp_path)):
        make_critic().load(tmp_path)


def test_a_fence_that_raises_leaves_the_critic(make_critic):
    critic = make_critic()
    critic.update(value_batch(), value_loss)
    before = values_of(critic)

    def closed():
        raise LookupError("gone")

    with pytest.raises(LookupError):
        critic.update(value_batch(), value_loss, fence=closed)
    np.testing.assert_array_equal(values_of(critic), before)


def test_a_nan_stops_before_the_critic_changes(make_critic):
    critic = make_critic()
    batch = value_batch()
    batch.returns[1][2] = np.nan
    with pytest.raises(RunError, match="not finite"):
        critic.update(batch, value_loss)
    assert not values_of(critic).any()
