"""The reward model: one label's logit at the last real token, whatever else is in the batch."""

import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

from tests.unit.train.conftest import SHAPE, VOCABULARY
from tranship.models.tiny import make_tokenizer
from tranship.models.tokenizer import save_tokenizer
from tranship.train.reward_model import RewardModel, _batches, check_same_tokens
from tranship.types import UserError

CLASSIFIERS = {
    "llama": (LlamaConfig, LlamaForSequenceClassification),
    "qwen2": (Qwen2Config, Qwen2ForSequenceClassification),
}
PAD = 2


def write_classifier(folder, family="llama", num_labels=1, **changes):
    config, model = CLASSIFIERS[family]
    torch.manual_seed(11)
    settings = {**SHAPE, "num_labels": num_labels, "pad_token_id": PAD, "initializer_range": 0.3, **changes}
    model(config(**settings)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=CLASSIFIERS)
def folder(request, tmp_path_factory):
    return write_classifier(tmp_path_factory.mktemp("reward"), request.param)


@pytest.fixture
def samples():
    """Prompts, groups and responses; some end with the padding id, and one response is empty."""
    generator = np.random.default_rng(4)
    prompts = [generator.integers(3, VOCABULARY, n, dtype=np.int32) for n in (4, 9)]
    responses = [generator.integers(3, VOCABULARY, n, dtype=np.int32) for n in (3, 17, 1, 8, 30, 0)]
    for row in (0, 1, 2):
        responses[row][-1] = PAD
    return prompts, np.array([0, 1, 1, 0, 1, 0]), responses


def plain_scores(folder, samples):
    """Each row alone, by transformers: the head on the hidden state of the last token, padding id or not."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    prompts, group_of, responses = samples
    rows = [np.concatenate([prompts[g], r]) for g, r in zip(group_of, responses, strict=True)]
    with torch.no_grad():
        hidden = [model.model(torch.from_numpy(row)[None].long()).last_hidden_state[0, -1] for row in rows]
        return model.score(torch.stack(hidden))[:, 0].numpy()


@pytest.mark.parametrize("batch_tokens", [1, 30, 64, 10_000])
def test_a_score_is_that_of_the_sample_alone(folder, samples, batch_tokens):
    seen = RewardModel(folder, device="cpu", batch_tokens=batch_tokens).scores(*samples)
    assert seen.dtype == np.float32
    np.testing.assert_allclose(seen, plain_scores(folder, samples), atol=1e-5)
    assert len(np.unique(seen.round(4))) == len(seen)


def test_a_classifiers_own_forward_would_read_another_token(folder, samples):
    """Its padding id may be a real last token: the reason why the score is not taken from its logits."""
    prompts, group_of, responses = samples
    model = RewardModel(folder, device="cpu", batch_tokens=100)
    shorter = [r[:-1] if len(r) and r[-1] == PAD else r for r in responses]
    gaps = np.abs(model.scores(*samples) - model.scores(prompts, group_of, shorter))
    assert (gaps[:3] > 1e-3).all()
    assert (gaps[3:] < 1e-5).all()


def test_no_samples_have_no_scores(folder):
    scores = RewardModel(folder, device="cpu", batch_tokens=100).scores([], np.zeros(0, dtype=np.int64), [])
    assert scores.shape == (0,)


def test_bf16_is_close(folder, samples):
    rough = RewardModel(folder, device="cpu", batch_tokens=100, dtype="bf16").scores(*samples)
    exact = plain_scores(folder, samples)
    assert np.abs(rough - exact).max() < 0.1 * np.abs(exact).max()


def test_the_model_is_left_without_gradients_and_in_evaluation(folder, samples):
    model = RewardModel(folder, device="cpu", batch_tokens=100)
    model.scores(*samples)
    assert not model._model.training
    assert all(p.grad is None for p in model._model.parameters())


def test_a_sample_longer_than_the_context_is_refused(folder, samples):
    prompts, group_of, responses = samples
    responses[3] = np.zeros(61, dtype=np.int32)
    with pytest.raises(UserError, match=r"65 tokens.*reads 64"):
        RewardModel(folder, device="cpu", batch_tokens=100).scores(prompts, group_of, responses)


@given(st.lists(st.integers(1, 30), max_size=20), st.integers(1, 60))
def test_batches_hold_each_row_once_within_the_limit(lengths, batch_tokens):
    runs = [run.tolist() for run in _batches(lengths, batch_tokens)]
    assert sorted(row for run in runs for row in run) == list(range(len(lengths)))
    for run in runs:
        assert len(run) * max(lengths[row] for row in run) <= batch_tokens or len(run) == 1


def test_several_labels_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"has 3 labels, and a reward model has one: use"):
        RewardModel(write_classifier(tmp_path, num_labels=3), device="cpu", batch_tokens=100)


def test_a_language_model_that_says_it_has_one_label_is_refused(tmp_path):
    LlamaForCausalLM(LlamaConfig(**SHAPE, num_labels=1)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"lacks 1 weight.*score.weight"):
        RewardModel(tmp_path, device="cpu", batch_tokens=100)


def test_a_classifier_that_reads_another_place_is_refused(tmp_path):
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=1
    )
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="no linear layer `score`"):
        RewardModel(tmp_path, device="cpu", batch_tokens=100)


@pytest.mark.parametrize("damage", ["no config", "no json", "no weights"])
def test_a_folder_that_does_not_load_is_named(tmp_path, damage):
    write_classifier(tmp_path)
    if damage == "no json":
        (tmp_path / "config.json").write_text("{")
    else:
        (tmp_path / ("config.json" if damage == "no config" else "model.safetensors")).unlink()
    with pytest.raises(UserError, match=str(tmp_path)):
        RewardModel(tmp_path, device="cpu", batch_tokens=100)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A folder with a tokenizer of 300 tokens and the config of a policy that embeds as many."""
    path = tmp_path_factory.mktemp("policy")
    LlamaConfig(**{**SHAPE, "vocab_size": 300}).save_pretrained(path)
    save_tokenizer(make_tokenizer(300), path)
    return path


@pytest.fixture
def judge(policy, tmp_path):
    """A copy of the policy's folder, to be changed."""
    return shutil.copytree(policy, tmp_path / "judge")


def test_the_same_tokens_pass_and_padding_may_differ(policy, judge):
    check_same_tokens(policy, judge)
    tokenizer = make_tokenizer(300)
    tokenizer.pad_token = "<|endoftext|>"
    save_tokenizer(tokenizer, judge)
    LlamaConfig(**{**SHAPE, "vocab_size": 320}).save_pretrained(judge)
    check_same_tokens(policy, judge)


def another_size(folder):
    save_tokenizer(make_tokenizer(301), folder)


def another_end(folder):
    tokenizer = make_tokenizer(300)
    tokenizer.eos_token = "<|endoftext|>"
    save_tokenizer(tokenizer, folder)


def another_order(folder):
    file = folder / "tokenizer.json"
    text = file.read_text(encoding="utf-8")
    first, second = '"!": 3', '"!": 4'
    assert first in text
    other = text.replace('": 4,', '": 3,', 1).replace(first, second)
    assert other != text
    file.write_text(other, encoding="utf-8")


def fewer_rows(folder):
    LlamaConfig(**{**SHAPE, "vocab_size": 299}).save_pretrained(folder)


def no_tokenizer(folder):
    for file in folder.glob("*token*"):
        file.unlink()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (another_size, "301 tokens, and the policy's 300"),
        (another_end, "its eos_token_id is 0, and the policy's 2"),
        (another_order, "token .* is 4 there, and 3 in the policy"),
        (fewer_rows, "it embeds 299 ids, and the policy samples from 300"),
    ],
)
def test_other_tokens_are_refused_with_the_reason(policy, judge, change, message):
    change(judge)
    with pytest.raises(UserError, match=message) as caught:
        check_same_tokens(policy, judge)
    assert str(judge) in str(caught.value)
    assert "never decoded and encoded again" in str(caught.value)


def test_a_folder_without_a_tokenizer_is_named(policy, judge):
    no_tokenizer(judge)
    with pytest.raises(UserError, match=f"^{judge} has no tokenizer"):
        check_same_tokens(policy, judge)
