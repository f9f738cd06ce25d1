"""Weights into vLLM: whole for every family, the known faults of its CPU build found by the probe and mended."""

import numpy as np
import pytest
import torch

from tranship.reshard import check_probe
from tranship.rollout.native import load_folder
from tranship.rollout.vllm import transfer
from tranship.types import RunError, SampleId, UserError

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_after_an_update_an_engine_is_as_a_fresh_one_and_the_same_weights_change_nothing(vllm_lab, family, tied):
    old, new = (vllm_lab.folder(family, tied, seed) for seed in range(2))
    sequence, greedy = vllm_lab.prompt(30), vllm_lab.group(0, 2, temperature=0.0)
    engine, fresh = vllm_lab.engine(old), vllm_lab.engine(new)
    vllm_lab.run(engine, greedy)
    check_probe(0, vllm_lab.native(old).probe(sequence), engine.probe(sequence), "fp32")
    expected = vllm_lab.native(new).probe(sequence)
    assert np.abs(engine.probe(sequence) - expected).max() > 0.05
    for version in (1, 2):
        load_folder(engine, new, version)
        probed = engine.probe(sequence)
        assert np.abs(probed - expected).max() <= 1e-5
        assert np.array_equal(probed, fresh.probe(sequence))
        wanted = vllm_lab.run(fresh, greedy)
        for sample, response in vllm_lab.run(engine, greedy).items():
            assert np.array_equal(response.token_ids, wanted[sample].token_ids)
            assert np.array_equal(response.logprobs, wanted[sample].logprobs)
            assert (response.policy_versions == version).all()


@pytest.mark.parametrize(
    ("family", "tied", "remedy"),
    [("llama", True, "_pack_heads_again"), ("qwen3_moe", False, "_forget_expert_kernels")],
)
def test_the_probe_refuses_what_vllm_leaves_wrong_without_the_remedy(vllm_lab, monkeypatch, family, tied, remedy):
    """A tied head keeps the weights that were there before; packed experts are overwritten by weights not packed."""
    folder = vllm_lab.folder(family, tied)
    sequence = vllm_lab.prompt(16)
    expected = vllm_lab.native(folder).probe(sequence)
    monkeypatch.setattr(transfer, remedy, lambda model: None)
    engine = vllm_lab.engine(folder)
    with pytest.raises(RunError, match="not the trainer's"):
        check_probe(0, expected, engine.probe(sequence), "fp32")
    monkeypatch.undo()
    load_folder(engine, folder, 1)
    check_probe(1, expected, engine.probe(sequence), "fp32")


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_latent_attention_is_refused_on_a_cpu(vllm_lab, family):
    with pytest.raises(UserError, match=r"latent attention.*native"):
        vllm_lab.engine(vllm_lab.folder(family))


@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_reaches_the_output(vllm_lab, tied):
    """A changed value anywhere must show: nothing reads a stale copy."""
    folder = vllm_lab.folder("qwen3", tied)
    engine, sequence = vllm_lab.engine(folder), vllm_lab.prompt(12)
    clean = engine.probe(sequence)
    tensors = _tensors(engine, folder)
    for changed in [name for name in tensors if "layers.1" not in name]:
        engine.begin_update()
        for name, tensor in tensors.items():
            target = engine.storage(name)
            target.copy_(tensor)
            if name == changed:
                target[int(sequence[3]) if tensor.ndim > 1 and "embed" in name else 0] += 0.5
        engine.finish_update(1)
        assert np.abs(engine.probe(sequence) - clean).max() > 1e-5, changed
    load_folder(engine, folder, 2)
    assert np.array_equal(engine.probe(sequence), clean)


def _tensors(engine, folder):
    from safetensors.torch import load_file

    loaded = load_file(folder / "model.safetensors")
    return {piece.name: loaded[piece.name] for piece in engine.pieces()}


def test_with_kept_caches_what_has_begun_goes_on_and_what_has_not_starts_under_the_new_version(vllm_lab):
    """The prompt is longer than a block of the cache (128 tokens): prefixes of the old version must not be shared."""
    old, new = vllm_lab.folder(seed=0), vllm_lab.folder(seed=1)
    prompt = vllm_lab.prompt(300)
    engine = vllm_lab.engine(old, on_update="keep", max_running=2)
    engine.submit(vllm_lab.group(0, 3, cap=5, prompt=prompt))
    for _ in range(2):
        assert engine.step() == []
    load_folder(engine, new, 1)
    done = vllm_lab.run(engine)
    alone = vllm_lab.run(vllm_lab.native(new), vllm_lab.group(0, 3, cap=5, prompt=prompt))
    for index in range(2):
        assert done[SampleId(0, index)].policy_versions.tolist() == [0, 0, 1, 1, 1]
    late = done[SampleId(0, 2)]
    assert late.policy_versions.tolist() == [1] * 5
    assert late.token_ids.tolist() == alone[SampleId(0, 2)].token_ids.tolist()
    assert np.abs(late.logprobs - alone[SampleId(0, 2)].logprobs).max() <= 1e-5


def test_tensors_are_there_during_an_update_only_and_no_step_runs_in_one(vllm_lab):
    engine = vllm_lab.engine()
    with pytest.raises(AssertionError, match="begin_update"):
        engine.storage("model.norm.weight")
    engine.begin_update()
    assert engine.storage("model.norm.weight").dtype == torch.float32
    with pytest.raises(AssertionError, match="begin_update"):
        engine.step()
    with pytest.raises(AssertionError, match="twice"):
        engine.begin_update()


def test_weights_that_are_not_finite_are_named_and_later_ones_go_on(vllm_lab):
    folder = vllm_lab.folder()
    engine = vllm_lab.engine(folder)
    tensors = _tensors(engine, folder)
    engine.begin_update()
    for name, tensor in tensors.items():
        engine.storage(name).copy_(tensor * float("nan"))
    engine.finish_update(1)
    assert np.isnan(engine.probe(vllm_lab.prompt(5))).all()
    engine.submit(vllm_lab.group(3, 2))
    with pytest.raises(RunError, match=r"not finite at policy version 1 for 2 samples .*\(3, 0, 0\)"):
        engine.step()
    assert engine.num_unfinished == 0
    load_folder(engine, folder, 2)
    assert len(vllm_lab.run(engine, vllm_lab.group(4))) == 4
