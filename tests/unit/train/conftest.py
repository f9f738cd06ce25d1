"""Tiny random models and ragged batches for the training engine."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tranship.config.schema import TrainConfig
from tranship.train import packed_steps
from tranship.train.transformers_engine import TransformersEngine
from tranship.types import SampleId, TrainBatch

VOCABULARY = 97
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
FAMILIES = {
    "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=False)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=True)),
}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory) -> dict[str, Path]:
    """One folder per family; weights are large enough that attention is far from uniform."""
    folders = {}
    for name, build in FAMILIES.items():
        torch.manual_seed(7)
        model = build()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.mean() + torch.randn_like(parameter) * 0.25)
        folder = tmp_path_factory.mktemp("models") / name
        model.save_pretrained(folder)
        (folder / "tokenizer.json").write_text("{}")
        (folder / "chat_template.jinja").write_text("{{ messages }}")
        folders[name] = folder
    return folders


@pytest.fixture
def make_engine(model_folders) -> Callable[..., TransformersEngine]:
    def make(family="llama-tied", *, temperature=1.0, deterministic=True, num_steps=10, **train) -> TransformersEngine:
        optimizer = {"learning_rate": 1e-2, **train.pop("optimizer", {})}
        config = TrainConfig(**{"steps": num_steps, "optimizer": optimizer, **train})
        return TransformersEngine(
            model_folders[family],
            config=config,
            temperature=temperature,
            max_response_tokens=12,
            num_steps=num_steps,
            device="cpu",
            seed=3,
            deterministic=deterministic,
        )

    return make


@pytest.fixture
def captured(monkeypatch) -> list[dict[str, torch.Tensor]]:
    """The gradients of each optimizer step, as they were before clipping."""
    steps = []
    apply = packed_steps.apply_gradients

    def spy(optimizer, parameters, **options):
        steps.append({name: p.grad.clone() for name, p in parameters.items() if p.grad is not None})
        return apply(optimizer, parameters, **options)

    monkeypatch.setattr(packed_steps, "apply_gradients", spy)
    return steps


def ragged_batch(seed: int, group_sizes: tuple[int, ...] = (3, 1, 4, 2), masked: bool = True) -> TrainBatch:
    """Samples of interleaved groups: responses of 1 to 12 tokens, some tokens and one whole row masked."""
    generator = np.random.default_rng(seed)
    prompts = [generator.integers(0, VOCABULARY, size, dtype=np.int32) for size in (5, 1, 9, 4)[: len(group_sizes)]]
    group_of = generator.permutation(np.repeat(np.arange(len(group_sizes)), group_sizes))
    lengths = [1, 12, *generator.integers(1, 13, len(group_of)).tolist()][: len(group_of)]
    masks = [generator.random(n) < 0.8 if masked else np.ones(n, dtype=bool) for n in lengths]
    masks[0][:] = True
    if masked:
        masks[-1][:] = False

    def floats(scale: float) -> list[np.ndarray]:
        return [(generator.standard_normal(n) * scale).astype(np.float32) for n in lengths]

    return TrainBatch(
        samples=[SampleId(int(group), row) for row, group in enumerate(group_of)],
        prompts=prompts,
        group_of=group_of.astype(np.int64),
        responses=[generator.integers(0, VOCABULARY, n, dtype=np.int32) for n in lengths],
        response_mask=masks,
        logprobs=[x - 4 for x in floats(0.3)],
        advantages=floats(1.0),
        ref_logprobs=[x - 4 for x in floats(0.3)],
        values=floats(0.5),
        returns=floats(1.0),
    )


@pytest.fixture
def batch() -> TrainBatch:
    return ragged_batch(0)
