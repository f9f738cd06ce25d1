"""What the contract tests of rollout engines share: two tiny models, an engine of the table, requests, a reference."""

from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tranship.rollout import GroupRequest
from tranship.types import SampleId, Sampling, sample_seed

VOCAB = 320
PROMPT = np.arange(3, 40, dtype=np.int32)


def save_model(folder, seed):
    """A model folder: Llama with random weights, drawn from `seed`; its generation settings are far from neutral."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            _ = parameter.normal_(0, 0.2) if parameter.ndim > 1 else parameter
    model.generation_config.update(do_sample=True, temperature=0.2, top_k=3, top_p=0.4, eos_token_id=[7, 9])
    model.save_pretrained(folder)
    return folder


def update(engine, folder, version):
    engine.begin_update()
    if hasattr(engine, "fill"):
        engine.fill(str(folder))
    fill(engine, folder)
    engine.finish_update(version)


@torch.no_grad()
def fill(engine, folder):
    """Write a folder's weights where the engine's pieces want them."""
    tensors = load_file(Path(folder) / "model.safetensors")
    for piece in engine.pieces():
        target = engine.storage(piece.storage)[tuple(slice(*bounds) for bounds in piece.storage_box)]
        target.copy_(tensors[piece.name][tuple(slice(*bounds) for bounds in piece.box)])


def group(group_id=0, count=4, partials=None, cap=20, prompt=PROMPT, **sampling):
    samples = tuple(SampleId(group_id, index) for index in range(count))
    seeds = tuple(sample_seed(0, sample) for sample in samples)
    return GroupRequest(prompt, samples, seeds, Sampling(cap, **sampling), partials)


def one(request, index):
    """A request for one sample of `request` alone."""
    return GroupRequest(
        request.prompt_ids, request.samples[index : index + 1], request.seeds[index : index + 1], request.sampling
    )


def run(engine, *requests):
    for request in requests:
        engine.submit(request)
    done = {}
    for _ in range(1000):
        if not engine.num_unfinished:
            return done
        done |= {response.sample: response for response in engine.step()}
    raise AssertionError("the engine does not finish")


@lru_cache(maxsize=4)
def plain_model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@torch.no_grad()
def next_logits(folder, prompt=PROMPT):
    """float64 [V]: what transformers says comes after the prompt."""
    return plain_model(folder)(torch.from_numpy(prompt.astype(np.int64))[None]).logits[0, -1].double().numpy()


@torch.no_grad()
def reference(folder, response, temperature=1.0, prompt=PROMPT):
    """float32: log-probs of the response's tokens at that temperature, from transformers."""
    ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
    logits = plain_model(folder)(ids[None]).logits[0] / temperature
    picked = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None])
    return picked.squeeze(1).numpy()
