"""The critic: values of states before tokens, gradients of the padded model, its own optimizer and checkpoint."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModel, LlamaConfig, LlamaForSequenceClassification

from tests.unit.train.conftest import SHAPE
from tests.unit.train.plain import assert_same_gradients, before_each_token, padded, padded_rows
from tranship.algorithms.masked import masked_sum, metric
from tranship.config.schema import CriticConfig, OptimizerConfig, TrainConfig
from tranship.train.critic import TransformersCritic
from tranship.types import RunError, UserError


def value_loss(inputs, totals):
    """Squared error, with a pull to the old values, so that every column matters."""
    errors = (inputs.values_BT - inputs.returns_BT).square() + 0.1 * (inputs.values_BT - inputs.old_values_BT).square()
    return masked_sum(errors, inputs.mask_BT) / totals.num_tokens, {"error": metric(errors, inputs.mask_BT)}


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A folder with a classification head of one label."""
    torch.manual_seed(5)
    model = LlamaForSequenceClassification(
        LlamaConfig(**SHAPE, num_labels=1, pad_token_id=2, initializer_range=0.2, tie_word_embeddings=False)
    )
    folder = tmp_path_factory.mktemp("critic")
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def make_critic(model_folders, classifier):
    def make(folder="llama-tied", *, optimizer=None, num_steps=10, deterministic=True, **train):
        return TransformersCritic(
            classifier if folder == "classifier" else model_folders[folder],
            config=TrainConfig(**{"steps": num_steps, **train}),
            critic=CriticConfig(
                path="classifier" if folder == "classifier" else None,
                optimizer=OptimizerConfig(**{"learning_rate": 1e-2, **(optimizer or {})}),
            ),
            max_response_tokens=12,
            num_steps=num_steps,
            device="cpu",
            seed=3,
            deterministic=deterministic,
        )

    return make


def with_a_head(critic):
    """The critic with a value head that is not zero, so that gradients reach every layer."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        critic._model.head.weight.copy_(torch.randn(critic._model.head.weight.shape, generator=generator) * 0.3)
        critic._model.head.bias.fill_(0.2)
    return critic


def plain_values(backbone, head, batch):
    """[N, T], by transformers alone on the padded batch."""
    tokens, attended = padded_rows(batch)
    hidden = backbone(input_ids=tokens, attention_mask=attended, use_cache=False).last_hidden_state
    return torch.nn.functional.linear(before_each_token(batch, hidden), head.weight, head.bias)[..., 0]


def rows(batch):
    return batch.prompts, batch.group_of, batch.responses


def weights(critic):
    return {name: p.detach().clone() for name, p in critic._model.named_parameters()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("family", ["llama-tied", "llama", "qwen2", "qwen3"])
def test_a_critic_from_the_policy_begins_with_values_of_exactly_0(make_critic, model_folders, batch, family):
    critic = make_critic(family)
    values = critic.values(*rows(batch))
    assert all(v.dtype == np.float32 and v.shape == r.shape for v, r in zip(values, batch.responses, strict=True))
    assert not np.concatenate(values).any()
    policy = AutoModel.from_pretrained(model_folders[family], dtype=torch.float32)
    assert same(
        {f"backbone.{name}": p.detach() for name, p in policy.named_parameters()},
        {name: p for name, p in weights(critic).items() if not name.startswith("head.")},
    )


@pytest.mark.parametrize("family", ["llama-tied", "qwen3"])
@pytest.mark.parametrize("microbatch_tokens", [1, 25, 4096])
def test_values_and_every_gradient_equal_the_padded_ones(
    make_critic, model_folders, captured, batch, family, microbatch_tokens
):
    critic = with_a_head(make_critic(family, microbatch_tokens=microbatch_tokens))
    backbone = AutoModel.from_pretrained(model_folders[family], dtype=torch.float32)
    head = with_a_head(make_critic(family))._model.head
    plain = plain_values(backbone, head, batch)
    for row, values in enumerate(critic.values(*rows(batch))):
        np.testing.assert_allclose(values, plain[row, : len(values)].detach(), rtol=1e-5, atol=1e-5)
    seen = critic.update(batch, value_loss)
    mask = padded(batch.response_mask)
    errors = (plain - padded(batch.returns)).square() + 0.1 * (plain - padded(batch.values)).square()
    loss = errors[mask].sum() / mask.sum()
    loss.backward()
    expected = {f"backbone.{name}": p.grad for name, p in backbone.named_parameters()}
    expected |= {"head.weight": head.weight.grad, "head.bias": head.bias.grad}
    assert_same_gradients(captured[0], expected)
    assert seen["critic_value_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert seen["critic_error"] == pytest.approx(loss.item(), rel=1e-5)
    norm = torch.stack([g.norm() for g in expected.values()]).norm().item()
    assert seen["critic_grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert seen.keys() == {"critic_value_loss", "critic_error", "critic_grad_norm", "critic_learning_rate"}


def test_a_value_knows_what_came_before_its_token_and_nothing_later(make_critic, batch):
    critic = with_a_head(make_critic())
    before = critic.values(*rows(batch))
    row = int(np.argmax([len(r) for r in batch.responses]))
    changed = [r.copy() for r in batch.responses]
    changed[row][4] = (changed[row][4] + 1) % 97
    after = critic.values(batch.prompts, batch.group_of, changed)
    np.testing.assert_allclose(after[row][:5], before[row][:5], atol=1e-5)
    assert np.abs(after[row][5:] - before[row][5:]).max() > 1e-3
    others = [other for other in range(len(before)) if other != row]
    assert max(np.abs(after[other] - before[other]).max() for other in others) < 1e-5


def test_a_classifier_gives_its_head(make_critic, classifier, batch):
    model = LlamaForSequenceClassification.from_pretrained(classifier, dtype=torch.float32)
    head = torch.nn.Linear(SHAPE["hidden_size"], 1)
    with torch.no_grad():
        head.weight.copy_(model.score.weight)
        head.bias.zero_()
        plain = plain_values(model.model, head, batch)
    for row, values in enumerate(make_critic("classifier").values(*rows(batch))):
        assert np.abs(values).max() > 0
        np.testing.assert_allclose(values, plain[row, : len(values)], atol=1e-5)


def test_a_head_of_several_labels_is_no_value_head(tmp_path, batch):
    LlamaForSequenceClassification(LlamaConfig(**SHAPE, num_labels=3, pad_token_id=2)).save_pretrained(tmp_path)
    critic = TransformersCritic(
        tmp_path,
        config=TrainConfig(steps=1),
        critic=CriticConfig(path="of several labels"),
        max_response_tokens=12,
        num_steps=1,
        device="cpu",
        seed=0,
        deterministic=True,
    )
    assert not np.concatenate(critic.values(*rows(batch))).any()


def test_training_brings_values_to_the_returns(make_critic, batch):
    critic = make_critic(optimizer={"learning_rate": 3e-2}, microbatch_tokens=30)
    pairs = list(zip(batch.group_of, batch.responses, strict=True))
    returns = [np.full(len(r), 0.5 + group, dtype=np.float32) for group, r in pairs]
    mask = np.concatenate(batch.response_mask)

    def error():
        return np.abs(np.concatenate(critic.values(*rows(batch))) - np.concatenate(returns))[mask].mean()

    def squared(inputs, totals):
        errors = (inputs.values_BT - inputs.returns_BT).square()
        return masked_sum(errors, inputs.mask_BT) / totals.num_tokens, {}

    before = error()
    for _ in range(30):
        critic.update(replace(batch, returns=returns), squared)
    assert error() < 0.3 * before


def test_minibatches_are_steps_with_the_critics_own_rate_clip_and_fence(make_critic, captured, batch):
    settings = {"learning_rate": 1e-3, "schedule": "linear", "max_grad_norm": 1e-9, "eps": 1.0}
    critic = with_a_head(make_critic(optimizer=settings, minibatches=2))
    before, fences = weights(critic), []
    rates = [critic.update(batch, value_loss, lambda: fences.append(1))["critic_learning_rate"] for _ in range(2)]
    assert rates == pytest.approx([1e-3, 0.9e-3])
    assert len(fences) == len(captured) == 4
    gaps = [float((p - before[name]).abs().max()) for name, p in weights(critic).items()]
    assert max(gaps) < 1e-9  # eps 1 makes AdamW's step proportional to the clipped gradient.


@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_loaded_critic_continues_bit_for_bit(make_critic, batch, tmp_path, steps_before):
    schedule = {"schedule": "cosine", "warmup_steps": 1}
    critic = make_critic(optimizer=schedule)
    for _ in range(steps_before):
        critic.update(batch, value_loss)
    critic.save(tmp_path)
    other = make_critic(optimizer=schedule)
    other.load(tmp_path)
    seen = [[c.update(batch, value_loss) for _ in range(2)] for c in (critic, other)]
    assert seen[0] == seen[1]
    assert same(weights(critic), weights(other))


def test_a_policys_checkpoint_is_refused(make_critic, make_engine, tmp_path):
    make_engine().save(tmp_path)
    with pytest.raises(UserError, match="another model"):
        make_critic().load(tmp_path)


@pytest.mark.parametrize("field", ["values", "returns"])
def test_what_is_not_finite_stops_before_the_weights_change(make_critic, batch, field):
    critic = make_critic()
    before = weights(critic)
    broken = [x.copy() for x in getattr(batch, field)]
    broken[0][0] = np.nan
    with pytest.raises(RunError, match="critic's loss is nan"):
        critic.update(replace(batch, **{field: broken}), value_loss)
    assert same(before, weights(critic))


def test_checkpointed_activations_and_bf16_keep_the_gradients(make_critic, captured, batch):
    for options in ({}, {"activation_checkpointing": True}, {"precision": "bf16", "deterministic": False}):
        with_a_head(make_critic(**options)).update(batch, value_loss)
    assert_same_gradients(captured[1], captured[0], 1e-6)
    assert_same_gradients(captured[2], captured[0], 0.1)


def test_deterministic_is_refused_where_it_cannot_be_kept(make_critic):
    with pytest.raises(UserError, match="deterministic"):
        make_critic(precision="bf16")
