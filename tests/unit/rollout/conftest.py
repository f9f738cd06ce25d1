"""Tiny random models, engines on them, and what transformers says about a sequence."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tranship.rollout import GroupRequest
from tranship.rollout.native import NativeEngine, load_folder
from tranship.types import SampleId, Sampling, sample_seed

VOCAB = 521


class Lab:
    """Makes model folders (kept for the session), engines and requests."""

    vocab = VOCAB

    def __init__(self, root):
        self._root = root
        self._folders = {}

    def folder(self, family="llama", tied=True, weights_seed=0, **config):
        key = (family, tied, weights_seed, repr(sorted(config.items())))
        if key not in self._folders:
            path = self._root / f"model{len(self._folders)}"
            _random_model(family, tied, weights_seed, config).save_pretrained(path)
            self._folders[key] = path
        return self._folders[key]

    def engine(self, folder=None, *, load=True, version=0, **settings):
        folder = folder or self.folder()
        engine = NativeEngine(folder, **(ENGINE_SETTINGS | settings))
        if load:
            load_folder(engine, folder, version)
        return engine

    def group(self, group_id, prompt, count=4, seed=0, partials=None, first=0, **sampling):
        samples = tuple(SampleId(group_id, index) for index in range(first, first + count))
        seeds = tuple(sample_seed(seed, sample) for sample in samples)
        how = Sampling(**({"max_response_tokens": 24} | sampling))
        return GroupRequest(np.asarray(prompt, np.int32), samples, seeds, how, partials)

    def prompt(self, seed, length=None):
        random = np.random.default_rng(seed)
        return random.integers(0, VOCAB, length or random.integers(3, 40)).astype(np.int32)

    def run(self, engine, *requests, limit=2000):
        for request in requests:
            engine.submit(request)
        done = {}
        for _ in range(limit):
            if not engine.num_unfinished:
                return done
            done |= {response.sample: response for response in engine.step()}
        raise AssertionError(f"{engine.num_unfinished} samples are unfinished after {limit} steps")

    def reference(self, folder, prompt, response, temperature=1.0):
        """float32 log-probs of the response's tokens, from transformers in fp32."""
        model = _plain_model(folder)
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids[None]).logits[0].float() / temperature, -1)
        start = len(prompt)
        return logprobs[start - 1 : -1].gather(1, ids[start:, None]).squeeze(1).numpy()


ENGINE_SETTINGS = {
    "dtype": "fp32",
    "device": "cpu",
    "max_running": 6,
    "max_tokens": 300,
    "on_update": "recompute",
    "deterministic": False,
    "eos_token_ids": (VOCAB - 1,),
    "ignore_eos": True,
}


_LATENT = {
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "num_key_value_heads": 6,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "routed_scaling_factor": 1.5,
}
_OWN_SIZES = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": True},
    "deepseek_v2": _LATENT
    | {
        "q_lora_rank": None,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
    },
    "deepseek_v3": _LATENT | {"q_lora_rank": 40, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2},
}


@lru_cache(maxsize=4)
def _plain_model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _random_model(family, tied, weights_seed, config):
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
    }
    torch.manual_seed(weights_seed)
    sizes |= _OWN_SIZES.get(family, {})
    if family.startswith("deepseek"):
        del sizes["head_dim"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(sizes | config)))
    with torch.no_grad():
        for parameter in model.parameters():
            _ = parameter.normal_(0, 0.15) if parameter.ndim > 1 else parameter.normal_(1, 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.1)
    return model.float()


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("models"))


@pytest.fixture
def prefilled(monkeypatch):
    """Watches an engine: the numbers of tokens of each chunk that it prefills."""

    def watch(engine):
        sizes = []
        plain = engine._model.prefill

        def prefill(chunks):
            sizes.extend(len(chunk.token_ids) for chunk in chunks)
            return plain(chunks)

        monkeypatch.setattr(engine._model, "prefill", prefill)
        return sizes

    return watch
