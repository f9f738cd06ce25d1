"""New weights: whole, once, also while samples run; sleep and wake."""

import numpy as np
import pytest
import torch
from safetensors import safe_open

from tranship.layouts.pieces import box_size
from tranship.rollout.native import load_folder
from tranship.types import RunError, SampleId, UserError

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_cover_each_logical_and_each_stored_element_once(lab, family, tied):
    folder = lab.folder(family, tied)
    engine = lab.engine(folder, load=False)
    pieces = engine.pieces()
    logical, stored = {}, {}
    for piece in pieces:
        assert piece.dtype == "float32"
        assert [b - a for a, b in piece.box] == [b - a for a, b in piece.storage_box[-len(piece.box) :]]
        assert box_size(piece.box) == box_size(piece.storage_box)
        count = logical.setdefault(piece.name, np.zeros(piece.shape, int))
        count[tuple(slice(*bounds) for bounds in piece.box)] += 1
        storage = engine.storage(piece.storage)
        count = stored.setdefault(piece.storage, np.zeros(tuple(storage.shape), int))
        count[tuple(slice(*bounds) for bounds in piece.storage_box)] += 1
    for count in (*logical.values(), *stored.values()):
        assert (count == 1).all()
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(logical)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("tied", [True, False])
def test_update_in_flight_with_recompute_continues_as_under_the_new_weights_alone(lab, tied, deterministic):
    old, new = lab.folder("qwen3", tied), lab.folder("qwen3", tied, weights_seed=1)
    prompt = lab.prompt(3)
    engine = lab.engine(old, version=4, deterministic=deterministic)
    engine.submit(lab.group(0, prompt, max_response_tokens=5))
    for _ in range(2):
        engine.step()
    load_folder(engine, new, 5)
    done = lab.run(engine)
    assert len(done) == 4
    for response in done.values():
        assert response.policy_versions.tolist() == [4, 4, 4, 5, 5]
        before = lab.reference(old, prompt, response.token_ids)[:3]
        after = lab.reference(new, prompt, response.token_ids)[3:]
        assert np.abs(response.logprobs - np.concatenate([before, after])).max() <= 1e-4


def test_update_in_flight_with_keep_leaves_the_cache(lab):
    old, new = lab.folder(), lab.folder(weights_seed=1)
    prompt = lab.prompt(3)
    engine = lab.engine(old, version=0, on_update="keep", max_running=2)
    engine.submit(lab.group(0, prompt, count=3, max_response_tokens=5))
    for _ in range(2):
        engine.step()
    load_folder(engine, new, 1)
    done = lab.run(engine)
    for sample in (SampleId(0, 0), SampleId(0, 1)):
        response = done[sample]
        assert response.policy_versions.tolist() == [0, 0, 0, 1, 1]
        before = lab.reference(old, prompt, response.token_ids)[:3]
        assert np.abs(response.logprobs[:3] - before).max() <= 1e-4
        recomputed = lab.reference(new, prompt, response.token_ids)[3:]
        assert np.abs(response.logprobs[3:] - recomputed).max() > 1e-3
    late = done[SampleId(0, 2)]
    assert late.policy_versions.tolist() == [1] * 5
    assert np.abs(late.logprobs - lab.reference(new, prompt, late.token_ids)).max() <= 1e-4


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_same_weights_again_change_nothing(lab, deterministic):
    folder, prompt = lab.folder(tied=False), lab.prompt(2)
    engine = lab.engine(folder, deterministic=deterministic)
    before = lab.run(engine, lab.group(0, prompt))
    probed = engine.probe(prompt)
    load_folder(engine, folder, 1)
    assert np.array_equal(engine.probe(prompt), probed)
    after = lab.run(engine, lab.group(0, prompt))
    for sample, response in before.items():
        assert np.array_equal(after[sample].token_ids, response.token_ids)
        assert np.array_equal(after[sample].logprobs, response.logprobs)


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
def test_the_same_weights_in_flight_change_nothing_to_the_bit_when_deterministic(lab, on_update):
    folder, prompt = lab.folder("qwen2"), lab.prompt(2)
    calm = lab.run(lab.engine(folder, deterministic=True), lab.group(0, prompt))
    engine = lab.engine(folder, deterministic=True, on_update=on_update)
    engine.submit(lab.group(0, prompt))
    for version in range(1, 4):
        engine.step()
        engine.step()
        load_folder(engine, folder, version)
    for sample, response in lab.run(engine).items():
        assert np.array_equal(response.token_ids, calm[sample].token_ids)
        assert np.array_equal(response.logprobs, calm[sample].logprobs)


@pytest.mark.parametrize(
    ("family", "tied"),
    [("qwen3", True), ("qwen3", False), ("qwen3_moe", False), ("deepseek_v2", True), ("deepseek_v3", False)],
)
def test_every_storage_reaches_the_output(lab, family, tied):
    """A flipped value anywhere must show: nothing reads a stale copy (a tied head, a packed matrix)."""
    folder, sequence = lab.folder(family, tied), lab.prompt(2, 30)
    engine = lab.engine(folder)
    clean = engine.probe(sequence)
    for name in {piece.storage for piece in engine.pieces()}:
        storage = engine.storage(name)
        saved = storage.clone()
        engine.begin_update()
        with torch.no_grad():
            row = int(sequence[3]) if storage.ndim > 1 and name == "embed" else 0
            storage[row] += 0.5
        engine.finish_update(1)
        assert np.abs(engine.probe(sequence) - clean).max() > 1e-5, name
        engine.begin_update()
        with torch.no_grad():
            storage.copy_(saved)
        engine.finish_update(2)
        assert np.array_equal(engine.probe(sequence), clean), name


def test_sleep_frees_and_wake_up_needs_an_update(lab):
    folder, prompt = lab.folder(), lab.prompt(2)
    engine = lab.engine(folder, version=3)
    before = lab.run(engine, lab.group(0, prompt))
    engine.sleep()
    assert engine.policy_version == -1
    with pytest.raises(AssertionError, match="freed"):
        engine.storage("embed")
    engine.wake_up()
    with pytest.raises(RunError, match="needs an update"):
        engine.probe(prompt)
    load_folder(engine, folder, 4)
    after = lab.run(engine, lab.group(0, prompt))
    for sample, response in before.items():
        assert np.array_equal(after[sample].token_ids, response.token_ids)
        assert after[sample].policy_versions.tolist() == [4] * 24


def test_sleep_before_the_first_weights_and_twice(lab):
    folder = lab.folder()
    engine = lab.engine(folder, load=False)
    engine.sleep()
    engine.sleep()
    engine.wake_up()
    load_folder(engine, folder, 0)
    assert len(lab.run(engine, lab.group(0, lab.prompt(1)))) == 4


def test_no_step_during_an_update_and_no_sleep_with_samples(lab):
    engine = lab.engine()
    engine.submit(lab.group(0, lab.prompt(1)))
    with pytest.raises(AssertionError, match="unfinished"):
        engine.sleep()
    engine.begin_update()
    with pytest.raises(AssertionError, match="begin_update"):
        engine.step()
    with pytest.raises(AssertionError, match="twice"):
        engine.begin_update()


def test_requests_wait_for_the_first_weights(lab):
    folder = lab.folder()
    engine = lab.engine(folder, load=False)
    engine.submit(lab.group(0, lab.prompt(1)))
    with pytest.raises(RunError, match="no weights yet"):
        engine.step()
    load_folder(engine, folder, 0)
    assert len(lab.run(engine)) == 4


def test_load_folder_names_what_does_not_fit(lab, tmp_path):
    with pytest.raises(UserError, match=r"no model\.safetensors"):
        load_folder(lab.engine(load=False), tmp_path, 0)
    with pytest.raises(UserError, match=r"no tensor model.layers.0.self_attn.q_norm"):
        load_folder(lab.engine(lab.folder("qwen3"), load=False), lab.folder(), 0)
    with pytest.raises(UserError, match=r"shape \[777, 96\], not \[521, 96\]"):
        load_folder(lab.engine(load=False), lab.folder(vocab_size=777), 0)
