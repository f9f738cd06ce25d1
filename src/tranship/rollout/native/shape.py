"""What the native engine knows of a model before it has weights: sizes and rotary angles, from config.json alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tranship.types import UserError

SUPPORTED_FAMILIES = ("llama", "qwen2", "qwen3")
SUPPORTED_ROPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class ModelShape:
    """Sizes and switches of a dense decoder (Llama, Qwen2, Qwen3).

    context: the longest sequence that the model was made for. rope_frequencies: float32 [head_dim / 2], radians per
    position; rope_scale multiplies both rotated vectors (YaRN's attention factor, else 1).
    """

    family: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    context: int
    norm_eps: float
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope_frequencies: torch.Tensor
    rope_scale: float

    @property
    def heads_per_kv(self) -> int:
        """Query heads that share one key head."""
        return self.num_heads // self.num_kv_heads


def read_shape(model_dir: Path, max_tokens: int) -> ModelShape:
    """The shape of the model in a Hugging Face folder, for sequences of up to `max_tokens`.

    Raises UserError for a folder without a readable config.json, a family, activation or rotary scaling that is not
    supported, and sequences that are longer than the model's context or its attention window.
    """
    config = _load_config(model_dir)
    family = config.model_type
    if family not in SUPPORTED_FAMILIES:
        architecture = ", ".join(config.architectures or ()) or "no architecture named"
        raise UserError(
            f"the native rollout engine does not support model type {family!r} ({architecture}) of {model_dir}: "
            f"use a model of type {', '.join(SUPPORTED_FAMILIES)}, or another rollout.engine"
        )
    if config.hidden_act not in ("silu", "swish"):
        raise UserError(f"{model_dir}: hidden_act {config.hidden_act!r} is not supported: use a model with silu")
    context = int(config.max_position_embeddings)
    if max_tokens > context:
        raise UserError(
            f"prompt and response of up to {max_tokens} tokens exceed the model's context of {context}: "
            "lower data.max_prompt_tokens or rollout.max_response_tokens"
        )
    _check_window(config, model_dir, max_tokens)
    frequencies, scale = _rope(config, model_dir)
    bias = bool(getattr(config, "attention_bias", False))
    return ModelShape(
        family=family,
        num_layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        mlp=config.intermediate_size,
        vocab=config.vocab_size,
        context=context,
        norm_eps=float(config.rms_norm_eps),
        tied=bool(config.tie_word_embeddings),
        qkv_bias=bias or family == "qwen2",
        o_bias=bias and family != "qwen2",
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        qk_norm=family == "qwen3",
        rope_frequencies=frequencies,
        rope_scale=scale,
    )


def _load_config(model_dir: Path) -> Any:
    if not (model_dir / "config.json").is_file():
        raise UserError(f"there is no config.json in {model_dir}: give the folder of a Hugging Face model")
    try:
        return AutoConfig.from_pretrained(model_dir, local_files_only=True)
    except Exception as error:
        raise UserError(f"{model_dir / 'config.json'} cannot be read: {type(error).__name__}: {error}") from error


def _check_window(config: Any, model_dir: Path, max_tokens: int) -> None:
    windowed = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if windowed and window is not None and window < max_tokens:
        raise UserError(
            f"{model_dir} attends over a window of {window} tokens, but sequences have up to {max_tokens}: "
            "the native engine has no windowed attention; shorten prompts or responses"
        )


def _rope(config: Any, model_dir: Path) -> tuple[torch.Tensor, float]:
    kind = config.rope_parameters.get("rope_type", "default")
    if kind not in SUPPORTED_ROPES:
        raise UserError(
            f"{model_dir}: rotary scaling {kind!r} is not supported: the native engine has {', '.join(SUPPORTED_ROPES)}"
        )
    if config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(f"{model_dir}: a partial rotary embedding is not supported by the native engine")
    if kind != "default":
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config)
        return frequencies.float(), float(scale)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return 1.0 / (config.rope_parameters["rope_theta"] ** exponents), 1.0
