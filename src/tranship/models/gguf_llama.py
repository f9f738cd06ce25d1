"""A GGUF file of a Llama model with a byte-level BPE tokenizer becomes a Hugging Face folder.

Needs the `convert` extra. Values are kept exactly: quantised blocks are expanded in fp32 and stored as fp32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from tranship.models.tokenizer import save_tokenizer
from tranship.types import UserError

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_SPECIAL_TOKEN_TYPE = 3


def convert(gguf_file: Path, folder: Path) -> None:
    """Write config, weights, tokenizer, chat template and generation settings of `gguf_file` into `folder`.

    Raises UserError if the file is of another architecture or tokenizer, or the `gguf` package is missing.
    """
    fields, tensors = _read(gguf_file)
    if fields["general.architecture"] != "llama" or fields["tokenizer.ggml.model"] != "gpt2":
        found = f"{fields['general.architecture']} with a {fields['tokenizer.ggml.model']} tokenizer"
        raise UserError(f"{gguf_file}: only llama models with a byte-level BPE tokenizer are converted, not {found}")
    config = _config(fields, tied="output.weight" not in tensors)
    weights = {_hf_name(name): _weight(name, tensor, config) for name, tensor in tensors.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    save_tokenizer(_tokenizer(fields), folder)
    GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    ).save_pretrained(folder)
    _verify(folder, weights)


def _read(gguf_file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        import gguf
    except ImportError as error:
        raise UserError("converting a GGUF file needs the package gguf: pip install 'tranship[convert]'") from error
    reader = gguf.GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return fields, {tensor.name: tensor for tensor in reader.tensors}


def _config(fields: dict[str, Any], tied: bool) -> LlamaConfig:
    num_heads = fields["llama.attention.head_count"]
    config = LlamaConfig(
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=num_heads,
        num_key_value_heads=fields.get("llama.attention.head_count_kv", num_heads),
        max_position_embeddings=fields["llama.context_length"],
        # The file keeps it as float32; its shortest decimal form is the one that was meant.
        rms_norm_eps=float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        rope_parameters={"rope_type": "default", "rope_theta": float(fields.get("llama.rope.freq_base", 10000.0))},
        tie_word_embeddings=tied,
        bos_token_id=fields.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields.get("tokenizer.ggml.padding_token_id"),
    )
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = "float32"
    return config


def _hf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in _TOP_TENSORS:
        return f"{_TOP_TENSORS[stem]}.weight"
    block, layer, part = stem.split(".")
    assert block == "blk", name
    return f"model.layers.{layer}.{_LAYER_TENSORS[part]}.weight"


def _weight(name: str, tensor: Any, config: LlamaConfig) -> np.ndarray:
    """The tensor in fp32, rows in Hugging Face's order."""
    from gguf import dequantize

    values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    values = values.reshape([int(extent) for extent in reversed(tensor.shape)])
    if ".attn_q." in name:
        values = _halves_from_pairs(values, int(config.num_attention_heads))
    elif ".attn_k." in name:
        values = _halves_from_pairs(values, int(config.num_key_value_heads or config.num_attention_heads))
    return np.ascontiguousarray(values)


def _halves_from_pairs(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head [.., (x0 y0 x1 y1 ..)] as [.., (x0 x1 .. y0 y1 ..)].

    GGUF lays the two parts of a rotary pair side by side, Hugging Face half a head apart.
    """
    rows, columns = values.shape
    pairs = values.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = _pre_tokenizer(fields["tokenizer.ggml.pre"])
    backend.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _SPECIAL_TOKEN_TYPE]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    named = {
        role: tokens[fields[f"tokenizer.ggml.{key}_token_id"]]
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"tokenizer.ggml.{key}_token_id" in fields
    }
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
        **{f"{role}_token": token for role, token in named.items()},
    )
    tokenizer.chat_template = fields.get("tokenizer.chat_template")
    return tokenizer


def _pre_tokenizer(kind: str) -> pre_tokenizers.PreTokenizer:
    """How text is cut before merges. smollm: each digit alone, then GPT-2's rule."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if kind in ("default", "gpt-2"):
        return byte_level
    if kind == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    raise UserError(f"the GGUF file's pre-tokenizer {kind!r} is not known here: only gpt-2 and smollm are")


def _verify(folder: Path, weights: dict[str, np.ndarray]) -> None:
    """Read back what was written. Raises UserError (a full or failing disk) where it differs."""
    with safe_open(folder / "model.safetensors", framework="np") as stored:
        same = set(stored.keys()) == set(weights) and all(
            np.array_equal(stored.get_tensor(name), values) for name, values in weights.items()
        )
    if not same or not all(bool(np.isfinite(values).all()) for values in weights.values()):
        raise UserError(f"{folder / 'model.safetensors'} does not hold what was written: check the disk, try again")
    json.loads((folder / "tokenizer.json").read_text())
