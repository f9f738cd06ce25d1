"""A tiny model folder with random weights and a working tokenizer and chat template: tests, benchmarks, no network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from tranship.models.tokenizer import save_tokenizer
from tranship.types import UserError

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
FAMILIES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
_HEAD_DIM = 32
_CONTEXT_LENGTH = 2048


def build(folder: Path, log: Callable[[str], None]) -> None:
    """Fill `folder` with the catalog's `tiny-random`: Llama, hidden 128, 4 layers, vocabulary 2048, seed 0."""
    log("tiny-random: making random weights")
    make_tiny(folder)


def make_tiny(
    folder: Path,
    family: str = "llama",
    vocab_size: int = 2048,
    hidden: int = 128,
    layers: int = 4,
    seed: int = 0,
    tied: bool = True,
) -> Path:
    """Write a model folder of `family` with random fp32 weights drawn from `seed`; returns the folder.

    hidden: a multiple of 32 (heads of 32; one key-value head for two query heads where that divides). Mixtures of
    experts have 8 experts as wide as the model, of which a token passes 2; DeepSeek's have a latent of 32, one expert
    that every token passes, a dense first layer, and (V3) 2 of 4 groups. vocab_size: at least 259 (three special
    tokens and the 256 bytes); the rest are merges of bytes. The end-of-text id is 2, and padding too. The context
    holds 2048 tokens.
    """
    if family not in FAMILIES:
        raise UserError(f"make_tiny: family {family!r} is not known; use one of: {', '.join(FAMILIES)}")
    if hidden % _HEAD_DIM or hidden < _HEAD_DIM:
        raise UserError(f"make_tiny: hidden {hidden} is not a multiple of {_HEAD_DIM}: use {_HEAD_DIM}, 64, 128, ...")
    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(make_tokenizer(vocab_size), folder)
    config = AutoConfig.for_model(
        family,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=hidden * 3,
        num_hidden_layers=layers,
        **_sizes(family, hidden),
        max_position_embeddings=_CONTEXT_LENGTH,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    config.architectures = [FAMILIES[family]]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    finally:
        if shown:
            logging.enable_progress_bar()
    return folder


def _sizes(family: str, hidden: int) -> dict[str, Any]:
    """Heads and experts, in the words of the family's config."""
    heads = hidden // _HEAD_DIM
    sizes: dict[str, Any] = {"num_attention_heads": heads}
    if not family.startswith("deepseek"):
        sizes |= {"num_key_value_heads": heads // 2 if heads % 2 == 0 else heads, "head_dim": _HEAD_DIM}
    if family == "qwen3_moe":
        sizes |= {"num_experts": 8, "norm_topk_prob": True}
    if family.startswith("deepseek"):
        sizes |= {
            "num_key_value_heads": heads,
            "qk_nope_head_dim": _HEAD_DIM,
            "qk_rope_head_dim": _HEAD_DIM // 2,
            "v_head_dim": _HEAD_DIM,
            "kv_lora_rank": 32,
            "q_lora_rank": 48 if family == "deepseek_v3" else None,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
        }
    if family == "deepseek_v3":
        # Other engines read these two from the config; transformers takes them for granted in this family.
        sizes |= {"n_group": 4, "topk_group": 2, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    if family == "qwen3_moe" or family.startswith("deepseek"):
        sizes |= {"num_experts_per_tok": 2, "moe_intermediate_size": hidden}
    return sizes


def make_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of exactly `vocab_size` tokens, the same each time: 3 special tokens, 256 bytes, and
    merges of pairs of letters. Any text can be encoded."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if not len(SPECIAL_TOKENS) + len(alphabet) <= vocab_size <= 4096:
        raise UserError(f"make_tiny: vocab_size {vocab_size} is outside 259..4096")
    tokens = [*SPECIAL_TOKENS, *alphabet]
    letters = "etaoinshrdlucmfwygpbvkxqjzETAOINSHRDLUCMFWYGPBVKXQJZ"
    pairs = [(a, b) for a in "Ġ" + letters for b in letters]
    pairs += [(a + b, c) for a, b in pairs[:200] for c in letters[:26]]
    merges = pairs[: vocab_size - len(tokens)]
    tokens += [a + b for a, b in merges]
    assert len(set(tokens)) == len(tokens) == vocab_size, (len(set(tokens)), len(tokens), vocab_size)
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=_CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
        bos_token=SPECIAL_TOKENS[1],
        eos_token=SPECIAL_TOKENS[2],
        unk_token=SPECIAL_TOKENS[0],
        pad_token=SPECIAL_TOKENS[2],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
