"""Recorded decode steps, with a stand-in for CUDA graphs: the operations of a step, done again on the same memory."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tranship.rollout.native import engine as engine_module
from tranship.rollout.native import load_folder
from tranship.rollout.native import recorded as module
from tranship.rollout.native.recorded import round_up
from tranship.types import UserError


class Operations(TorchDispatchMode):
    """Keeps every operation with its tensors, as a graph does: what Python decided meanwhile is fixed."""

    def __init__(self):
        super().__init__()
        self.done = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.done.append((function, args, kwargs or {}, out))
        return out

    def replay(self):
        for function, args, kwargs, out in self.done:
            again = function(*args, **kwargs)
            for kept, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(kept, torch.Tensor) and kept.data_ptr() != new.data_ptr():
                    kept.copy_(new)


class Recorder:
    def __init__(self):
        self.graphs, self.replays = 0, 0

    def __call__(self, run):
        operations = Operations()
        with operations:
            run()
        self.graphs += 1

        def replay():
            self.replays += 1
            operations.replay()

        return replay


@pytest.fixture
def recorder(monkeypatch):
    # Both engines compute with torch then.
    monkeypatch.setattr(engine_module, "kernels_for", lambda device, dim: None)
    return Recorder()


def work(lab):
    """Groups of several sizes, more samples than slots, prompts and responses of many lengths."""
    return [
        lab.group(0, lab.prompt(1, 20), count=4, max_response_tokens=60),
        lab.group(1, lab.prompt(2, 5), count=1, max_response_tokens=150),
        lab.group(2, lab.prompt(3, 140), count=3, max_response_tokens=20),
        lab.group(3, lab.prompt(4, 33), count=6, max_response_tokens=40, temperature=0.7),
    ]


def same(found, wanted, tolerance):
    assert found.keys() == wanted.keys()
    for name, response in wanted.items():
        np.testing.assert_array_equal(found[name].token_ids, response.token_ids)
        assert np.abs(found[name].logprobs - response.logprobs).max() <= tolerance


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_recorded_steps_give_the_same_tokens(lab, recorder, family):
    folder = lab.folder(family)
    wanted = lab.run(lab.engine(folder, max_running=9), *work(lab))
    assert len({len(response.token_ids) for response in wanted.values()}) >= 4
    found = lab.run(lab.engine(folder, max_running=9, record=recorder), *work(lab))
    same(found, wanted, 1e-5)
    assert recorder.replays > 2 * recorder.graphs > 0


def test_in_bf16_the_log_probs_are_as_near(lab, recorder):
    wanted = lab.run(lab.engine(dtype="bf16"), *work(lab)[:2])
    found = lab.run(lab.engine(dtype="bf16", record=recorder), *work(lab)[:2])
    gaps = []
    for name, response in wanted.items():
        other = found[name]
        equal = np.cumprod(response.token_ids[: len(other.token_ids)] == other.token_ids[: len(response.token_ids)])
        count = int(equal.sum())
        gaps.append(np.abs(response.logprobs[:count] - other.logprobs[:count]).max())
    assert max(gaps) <= 0.1
    assert recorder.replays


def test_graphs_go_with_the_weights_that_they_read(lab, recorder):
    engine = lab.engine(record=recorder)
    lab.run(engine, *work(lab)[:2])
    before = recorder.graphs
    assert before
    other = lab.folder(weights_seed=1)
    load_folder(engine, other, 1)
    found = lab.run(engine, *work(lab)[:2])
    assert recorder.graphs > before
    same(found, lab.run(lab.engine(other), *work(lab)[:2]), 1e-5)


def test_an_engine_that_slept_records_anew(lab, recorder):
    engine = lab.engine(record=recorder)
    wanted = lab.run(engine, *work(lab)[:2])
    engine.sleep()
    assert not engine._model._recorded._graphs
    assert engine._model._recorded._logits is None
    engine.wake_up()
    load_folder(engine, lab.folder(), 1)
    same(lab.run(engine, *work(lab)[:2]), wanted, 0.0)


def test_a_partial_response_goes_on(lab, recorder):
    group = work(lab)[0]
    wanted = lab.run(lab.engine(), group)
    engine = lab.engine(record=recorder)
    engine.submit(group)
    for _ in range(17):
        assert not engine.step()
    partials = {response.sample: response for response in engine.abort()}
    assert len(partials) == 4
    again = lab.group(0, lab.prompt(1, 20), count=4, max_response_tokens=60, partials=partials)
    same(lab.run(engine, again), wanted, 1e-5)


def test_few_graphs_are_kept(lab, recorder, monkeypatch):
    monkeypatch.setattr(module, "MAX_GRAPHS", 2)
    engine = lab.engine(max_running=9, record=recorder)
    same(lab.run(engine, *work(lab)), lab.run(lab.engine(max_running=9), *work(lab)), 1e-5)
    assert len(engine._model._recorded._graphs) == 2


def test_a_device_that_cannot_record_goes_on_without(lab, recorder, caplog):
    tried = []

    def cannot(run):
        tried.append(run)
        raise RuntimeError("out of memory")

    engine = lab.engine(max_running=9, record=cannot)
    with caplog.at_level(logging.WARNING):
        same(lab.run(engine, *work(lab)), lab.run(lab.engine(max_running=9), *work(lab)), 1e-5)
    assert len(tried) == 1
    assert "without graphs from now on, slower: one could not be recorded: out of memory" in caplog.text


def test_steps_have_few_sizes():
    sizes = [round_up(count) for count in range(1, 1025)]
    assert all(count <= size <= max(8, count * 5 // 4 + 8) for count, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes)
    assert len(set(sizes)) < 40


def test_a_mixture_is_refused(lab, recorder):
    with pytest.raises(UserError, match=r"rollout\.cuda_graphs needs a dense model.*set it to false"):
        lab.engine(lab.folder("qwen3_moe"), load=False, record=recorder)
