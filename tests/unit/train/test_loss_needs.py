"""What a loss is given: the group of each sample, the entropy and whole groups where it asks for them."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.unit.train.conftest import ragged_batch
from tests.unit.train.plain import assert_same_gradients, gradients_of, padded, plain_distributions, plain_logprobs
from tranship.algorithms.masked import masked_sum
from tranship.train import LossInputs, Totals, loss_needs
from tranship.types import TrainBatch


@dataclass
class Recorder:
    """A loss over log-probs and (where asked for) entropies that keeps what it was given."""

    needs_entropy: bool = False
    whole_groups: bool = False
    seen: list[tuple[LossInputs, Totals]] = field(default_factory=list)

    def __call__(self, inputs, totals):
        self.seen.append((inputs, totals))
        terms = inputs.logprobs_BT * inputs.advantages_BT
        if inputs.entropy_BT is not None:
            terms = terms + 0.3 * inputs.entropy_BT.square()
        return masked_sum(terms, inputs.mask_BT) / totals.num_tokens, {"seen": (len(inputs.mask_BT), 1.0)}


def plain_function(inputs, totals):
    assert inputs.entropy_BT is None
    return masked_sum(inputs.logprobs_BT, inputs.mask_BT) / totals.num_tokens, {}


def test_a_plain_function_asks_for_nothing(make_engine, batch):
    assert loss_needs(plain_function) == (False, False)
    assert loss_needs(Recorder(needs_entropy=True)) == (True, False)
    assert loss_needs(Recorder(whole_groups=True)) == (False, True)
    assert make_engine().update(batch, plain_function)["num_tokens"] > 0


@pytest.mark.parametrize("microbatch_tokens", [1, 25, 4096])
def test_samples_carry_the_number_of_their_prompt(make_engine, batch, microbatch_tokens):
    loss = Recorder()
    make_engine(microbatch_tokens=microbatch_tokens, minibatches=2).update(batch, loss)
    seen = []
    for inputs, _ in loss.seen:
        assert inputs.group_B.dtype == torch.int64
        assert inputs.entropy_BT is None
        for group, advantages, mask in zip(inputs.group_B.tolist(), inputs.advantages_BT, inputs.mask_BT, strict=True):
            seen.append((group, advantages[mask].tolist()))
    kept = [row for row, mask in enumerate(batch.response_mask) if mask.any()]
    expected = [(int(batch.group_of[row]), batch.advantages[row][batch.response_mask[row]].tolist()) for row in kept]
    assert sorted(seen) == sorted(expected)


def test_groups_that_have_an_unmasked_token_are_counted_per_step(make_engine, batch):
    masks = [np.zeros_like(m) if g == 3 else m for g, m in zip(batch.group_of, batch.response_mask, strict=True)]
    loss = Recorder()
    make_engine(minibatches=2).update(replace(batch, response_mask=masks), loss)
    learned = {int(g) for g, m in zip(batch.group_of, masks, strict=True) if m.any()}
    assert [totals.num_groups for _, totals in loss.seen] == [len(learned & {0, 1}), len(learned & {2})]


@pytest.mark.parametrize("family", ["llama-tied", "llama"])
@pytest.mark.parametrize("microbatch_tokens", [25, 4096])
def test_entropies_and_their_gradients_equal_the_padded_ones(
    make_engine, model_folders, captured, batch, family, microbatch_tokens
):
    loss = Recorder(needs_entropy=True)
    make_engine(family, temperature=0.7, microbatch_tokens=microbatch_tokens).update(batch, loss)
    model = AutoModelForCausalLM.from_pretrained(model_folders[family], dtype=torch.float32)
    logp = plain_distributions(model, batch, 0.7)
    entropy = -(logp.exp() * logp).sum(-1)
    mask = padded(batch.response_mask)
    inputs = LossInputs(
        plain_logprobs(model, batch, 0.7), padded(batch.logprobs), padded(batch.advantages), mask, entropy_BT=entropy
    )
    Recorder()(inputs, Totals(int(mask.sum()), int(mask.any(-1).sum()), 12))[0].backward()
    assert_same_gradients(captured[0], gradients_of(model))
    seen = torch.cat([i.entropy_BT[i.mask_BT] for i, _ in loss.seen]).sort().values
    torch.testing.assert_close(seen, entropy[mask].sort().values, rtol=1e-5, atol=1e-5)
    assert all((i.entropy_BT[~i.mask_BT] == 0).all() for i, _ in loss.seen)


@pytest.mark.parametrize("microbatch_tokens", [1, 25, 60])
def test_whole_groups_come_in_one_microbatch_with_every_sample(make_engine, batch, microbatch_tokens):
    """Also those without an unmasked token, which have a place in a comparison."""
    lone = next(row for row in range(len(batch)) if (batch.group_of == batch.group_of[row]).sum() > 1)
    masks = [np.zeros_like(m) if row == lone else m for row, m in enumerate(batch.response_mask)]
    batch = replace(batch, response_mask=masks)
    loss = Recorder(whole_groups=True)
    make_engine(microbatch_tokens=microbatch_tokens).update(batch, loss)
    seen = [inputs.group_B.tolist() for inputs, _ in loss.seen]
    trained = {int(g) for g, m in zip(batch.group_of, masks, strict=True) if m.any()}
    assert sorted(g for groups in seen for g in groups) == sorted(int(g) for g in batch.group_of if g in trained)
    assert sum(len(set(groups)) for groups in seen) == len(trained)
    assert {totals.num_sequences for _, totals in loss.seen} == {sum(m.any() for m in masks)}
    if microbatch_tokens == 1:
        assert len(seen) == len(trained)


def test_whole_groups_change_no_gradient_of_a_loss_that_does_not_need_them(make_engine, captured, batch):
    for whole in (False, True):
        make_engine(microbatch_tokens=20).update(batch, Recorder(whole_groups=whole))
    assert_same_gradients(captured[1], captured[0])


HOLES = {
    "holes": lambda n, generator: generator.random(n) < 0.5,
    "leading": lambda n, generator: np.arange(n) >= n // 2,
    "turns": lambda n, generator: (np.arange(n) // 2) % 2 == 1,
    "last": lambda n, generator: np.arange(n) == n - 1,
}


@pytest.mark.parametrize("kind", HOLES)
@pytest.mark.parametrize("microbatch_tokens", [20, 4096])
def test_what_is_learned_may_lie_anywhere_in_a_response(make_engine, model_folders, captured, kind, microbatch_tokens):
    """Recorded conversations: user turns inside the response, and responses whose first tokens are masked."""
    generator = np.random.default_rng(3)
    base: TrainBatch = ragged_batch(1, masked=False)
    masks = [HOLES[kind](len(r), generator) for r in base.responses]
    batch = replace(base, response_mask=masks)
    make_engine("qwen3", microbatch_tokens=microbatch_tokens).update(batch, Recorder())
    model = AutoModelForCausalLM.from_pretrained(model_folders["qwen3"], dtype=torch.float32)
    mask = padded(masks)
    assert mask.any()
    assert any(m.any() and not m[0] for m in masks)
    inputs = LossInputs(plain_logprobs(model, batch), padded(batch.logprobs), padded(batch.advantages), mask)
    Recorder()(inputs, Totals(int(mask.sum()), int(mask.any(-1).sum()), 12))[0].backward()
    assert_same_gradients(captured[0], gradients_of(model))
