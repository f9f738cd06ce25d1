import json

import numpy as np
import pytest
import torch

from tranship.algorithms.objective import make_loss
from tranship.config.schema import AlgorithmConfig
from tranship.types import UserError

LOSS = make_loss(AlgorithmConfig())


def weights(engine):
    return [engine.storage(piece.storage).clone() for piece in engine.pieces()]


@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_loaded_engine_continues_bit_for_bit(make_engine, batch, tmp_path, steps_before):
    schedule = {"schedule": "cosine", "warmup_steps": 1}
    engine = make_engine(optimizer=schedule)
    for _ in range(steps_before):
        engine.update(batch, LOSS)
    engine.save(tmp_path / "state")
    random = torch.rand(3), np.random.rand(3)
    rates = [engine.update(batch, LOSS)["learning_rate"] for _ in range(2)]
    other = make_engine(optimizer=schedule)
    storages = [other.storage(piece.storage).data_ptr() for piece in other.pieces()]
    other.load(tmp_path / "state")
    assert torch.equal(torch.rand(3), random[0])
    assert (np.random.rand(3) == random[1]).all()
    assert [other.update(batch, LOSS)["learning_rate"] for _ in range(2)] == rates
    assert all(torch.equal(a, b) for a, b in zip(weights(engine), weights(other), strict=True))
    assert [other.storage(piece.storage).data_ptr() for piece in other.pieces()] == storages


def test_nothing_is_pickled(make_engine, batch, tmp_path):
    engine = make_engine()
    engine.update(batch, LOSS)
    engine.save(tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".safetensors", ".json"}
    json.loads((tmp_path / "train.json").read_text())


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(make_engine, batch, tmp_path):
    make_engine("qwen2").save(tmp_path)
    engine = make_engine("llama")
    before = weights(engine)
    with pytest.raises(UserError, match="another model"):
        engine.load(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(weights(engine), before, strict=True))


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors", "random.safetensors", "train.json"])
def test_a_missing_or_damaged_file_is_named(make_engine, batch, tmp_path, name):
    engine = make_engine()
    engine.update(batch, LOSS)
    engine.save(tmp_path)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:20])
    with pytest.raises(UserError, match="damaged"):
        engine.load(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(UserError, match=name):
        engine.load(tmp_path)
