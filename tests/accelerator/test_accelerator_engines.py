"""On the device: the sampler's log-probs are the model's, and the trainer's gradients are those of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tranship.algorithms.objective import make_loss
from tranship.config.schema import AlgorithmConfig, OptimizerConfig, TrainConfig
from tranship.rollout import GroupRequest
from tranship.rollout.native.engine import NativeEngine
from tranship.rollout.native.recorded import CudaRecorder, Record
from tranship.train import packed_steps
from tranship.train.transformers_engine import TransformersEngine
from tranship.types import Response, SampleId, Sampling, TrainBatch, sample_seed

pytestmark = pytest.mark.accelerator

PROMPT = np.arange(3, 60, dtype=np.int32)


def sampler(model_dir: Path, device: str, dtype: str, record: Record | None = None) -> NativeEngine:
    engine = NativeEngine(
        model_dir,
        dtype=dtype,
        device=device,
        max_running=16,
        max_tokens=128,
        on_update="recompute",
        deterministic=False,
        eos_token_ids=(2,),
        record=record,
    )
    load(engine, model_dir, 4)
    return engine


@torch.no_grad()
def load(engine: NativeEngine, model_dir: Path, version: int) -> None:
    tensors = load_file(model_dir / "model.safetensors")
    engine.begin_update()
    for piece in engine.pieces():
        target = engine.storage(piece.storage)[tuple(slice(*bounds) for bounds in piece.storage_box)]
        target.copy_(tensors[piece.name][tuple(slice(*bounds) for bounds in piece.box)])
    engine.finish_update(version)


def sample(engine: NativeEngine, temperature: float) -> list[Response]:
    for group in range(2):
        samples = tuple(SampleId(group, index) for index in range(6))
        seeds = tuple(sample_seed(1, name) for name in samples)
        engine.submit(GroupRequest(PROMPT[group:], samples, seeds, Sampling(40, temperature)))
    done: list[Response] = []
    for _ in range(200):
        done += engine.step()
        if not engine.num_unfinished:
            return done
    raise AssertionError("the engine does not finish")


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-4), ("bf16", 0.1)])
def test_sampled_logprobs_are_those_of_a_plain_forward(
    device: str, model_dir: Path, dtype: str, tolerance: float
) -> None:
    done = sample(sampler(model_dir, device, dtype), temperature=0.8)
    assert len(done) == 12
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).to(device)
    for response in done:
        assert (response.policy_versions == 4).all()
        prompt = PROMPT[response.sample.group_id :]
        ids = torch.from_numpy(np.concatenate([prompt, response.token_ids]).astype(np.int64)).to(device)
        with torch.no_grad():
            logits = model(ids[None]).logits[0, len(prompt) - 1 : -1].float() / 0.8
        expected = torch.log_softmax(logits, -1).gather(1, ids[len(prompt) :, None]).squeeze(1).cpu().numpy()
        assert np.abs(expected - response.logprobs).max() <= tolerance


def test_the_same_seeds_give_the_same_tokens(device: str, model_dir: Path) -> None:
    first = {r.sample: r.token_ids for r in sample(sampler(model_dir, device, "fp32"), 1.0)}
    second = {r.sample: r.token_ids for r in sample(sampler(model_dir, device, "fp32"), 1.0)}
    assert len({ids.tobytes() for ids in first.values()}) > 1
    same = sum(np.array_equal(first[name], second[name]) for name in first)
    assert same >= 11, "rounding may turn one draw, not most of them"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_steps_that_are_graphs_give_the_same_tokens(device: str, model_dir: Path, dtype: str) -> None:
    if device != "cuda":
        pytest.skip(f"CUDA graphs need a CUDA device, and this one is {device}")
    plain = {r.sample: r for r in sample(sampler(model_dir, device, dtype), 1.0)}
    recorded = sampler(model_dir, device, dtype, CudaRecorder(torch.device(device)))
    for turn in range(4):
        # The second time all sizes have their graphs; then the weights are others, and so are they; then it has slept.
        if turn == 2:
            load(recorded, model_dir, 4)
        elif turn == 3:
            recorded.sleep()
            recorded.wake_up()
            load(recorded, model_dir, 4)
        found = {r.sample: r for r in sample(recorded, 1.0)}
        gaps, same = [], 0
        for name, response in plain.items():
            wanted, given = response.token_ids, found[name].token_ids
            size = min(len(wanted), len(given))
            alike = int(np.cumprod(wanted[:size] == given[:size]).sum())
            gaps.append(np.abs(response.logprobs[:alike] - found[name].logprobs[:alike]).max(initial=0.0))
            same += alike == len(wanted) == len(given)
        assert max(gaps) <= (1e-4 if dtype == "fp32" else 0.1)
        assert dtype != "fp32" or same >= 11, "rounding may turn one draw, not most of them"


def trainer(model_dir: Path, device: str, precision: str = "fp32", **train: object) -> TransformersEngine:
    config = TrainConfig.model_validate({"steps": 4, "precision": precision, "microbatch_tokens": 96, **train})
    return TransformersEngine(
        model_dir,
        config=config,
        temperature=0.8,
        max_response_tokens=24,
        num_steps=4,
        device=device,
        seed=0,
        deterministic=False,
    )


Gradients = dict[str, torch.Tensor]


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[Gradients]:
    """The gradients of each optimizer step, on the CPU, as they were before clipping."""
    steps: list[Gradients] = []
    apply: Callable[..., float] = packed_steps.apply_gradients

    def spy(optimizer: object, parameters: dict[str, torch.nn.Parameter], **settings: object) -> float:
        steps.append({name: p.grad.cpu().clone() for name, p in parameters.items() if p.grad is not None})
        return apply(optimizer, parameters, **settings)

    monkeypatch.setattr(packed_steps, "apply_gradients", spy)
    return steps


@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_gradient_is_that_of_the_cpu(
    device: str, model_dir: Path, batch: TrainBatch, captured: list[Gradients], checkpointing: bool
) -> None:
    loss = make_loss(AlgorithmConfig())
    trainer(model_dir, "cpu").update(batch, loss)
    trainer(model_dir, device, activation_checkpointing=checkpointing).update(batch, loss)
    expected, seen = captured
    assert expected.keys() == seen.keys()
    for name, gradient in expected.items():
        gap = float((seen[name] - gradient).norm() / gradient.norm())
        assert gap <= 1e-4, f"{name}: {gap:.1e}"


def test_logprobs_are_those_of_the_cpu(device: str, model_dir: Path, batch: TrainBatch) -> None:
    rows = (batch.prompts, batch.group_of, batch.responses)
    for precision, tolerance in (("fp32", 1e-4), ("bf16", 0.1)):
        expected = trainer(model_dir, "cpu").logprobs(*rows)
        for a, b in zip(expected, trainer(model_dir, device, precision).logprobs(*rows), strict=True):
            assert np.abs(a - b).max() <= tolerance


def test_bf16_steps_lower_the_loss(device: str, model_dir: Path, batch: TrainBatch) -> None:
    engine = trainer(model_dir, device, "bf16", optimizer=OptimizerConfig(learning_rate=1e-3).model_dump())
    batch.logprobs = engine.logprobs(batch.prompts, batch.group_of, batch.responses)
    loss = make_loss(AlgorithmConfig(clip_low=0.9, clip_high=10.0))
    losses = [engine.update(batch, loss)["loss"] for _ in range(4)]
    assert all(np.isfinite(losses))
    assert losses[-1] < losses[0]


def test_a_checkpoint_goes_on_bit_for_bit(device: str, model_dir: Path, batch: TrainBatch, tmp_path: Path) -> None:
    loss = make_loss(AlgorithmConfig())
    first = trainer(model_dir, device)
    first.update(batch, loss)
    (tmp_path / "state").mkdir()
    first.save(tmp_path / "state")
    second = trainer(model_dir, device)
    second.load(tmp_path / "state")
    for piece in first.pieces():
        assert torch.equal(first.storage(piece.storage), second.storage(piece.storage)), piece.name
