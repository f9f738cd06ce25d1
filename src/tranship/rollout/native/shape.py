"""What the native engine knows of a model before it has weights: sizes and rotary angles, from config.json alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig

from tranship.rollout.native.rope import latent_scale, rope_angles
from tranship.types import UserError

SUPPORTED_FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3")
V2_METHODS = ("greedy", "group_limited_greedy")


@dataclass(frozen=True)
class LatentShape:
    """Latent attention (DeepSeek-V2, Liu et al. 2024, section 2.1): one latent vector stands for all heads' keys and
    values.

    q_rank: elements of the queries' latent, None where queries are projected directly. kv_rank: of the keys' and
    values'. nope_dim, rope_dim: elements of a query or key that are not turned, and that are. value_dim: of a head's
    value. interleaved: the two elements that are turned together lie side by side.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool


@dataclass(frozen=True)
class ExpertShape:
    """Routed experts. mlp: width of one. shared_mlp: width of those that every token passes, together (0: none).

    scores: how the router's products become scores. normalised: the chosen scores are divided by their sum; scale
    multiplies them. num_groups, top_groups: experts are chosen within the top_groups best of num_groups groups;
    best_of: a group's score is the sum of its best_of best experts. corrected: a bias is added for the choice alone.
    fp32_router: the router computes in fp32, whatever the engine's dtype.
    """

    num_experts: int
    top_k: int
    mlp: int
    shared_mlp: int
    scores: Literal["softmax", "sigmoid"]
    normalised: bool
    scale: float
    num_groups: int
    top_groups: int
    best_of: int
    corrected: bool
    fp32_router: bool


@dataclass(frozen=True)
class ModelShape:
    """Sizes and switches of a decoder (Llama, Qwen2, Qwen3, Qwen3-MoE, DeepSeek-V2, DeepSeek-V3).

    num_kv_heads, head_dim, kv_sides: what the cache keeps of a token: keys and values of every key head (two sides),
    or with latent attention one vector that is both. context: the longest sequence that the model was made for.
    rope_frequencies: float32, radians per position of each pair that is turned; rope_scale multiplies both rotated
    vectors (YaRN's attention factor, else 1). attention_scale multiplies the scores. expert_layers: which layers have
    routed experts instead of one dense mlp.
    """

    family: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_sides: int
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
    attention_scale: float
    latent: LatentShape | None = None
    experts: ExpertShape | None = None
    expert_layers: frozenset[int] = frozenset()

    @property
    def heads_per_kv(self) -> int:
        """Query heads that share one key head."""
        return self.num_heads // self.num_kv_heads


def read_shape(model_dir: Path, max_tokens: int) -> ModelShape:
    """The shape of the model in a Hugging Face folder, for sequences of up to `max_tokens`.

    Raises UserError for a folder without a readable config.json, a family, activation, routing or rotary scaling that
    is not supported, and sequences that are longer than the model's context or its attention window.
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
    experts, expert_layers = _experts(config, model_dir)
    bias = bool(getattr(config, "attention_bias", False))
    return ModelShape(
        family=family,
        num_layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        num_heads=config.num_attention_heads,
        mlp=config.intermediate_size,
        vocab=config.vocab_size,
        context=context,
        norm_eps=float(config.rms_norm_eps),
        tied=bool(config.tie_word_embeddings),
        qkv_bias=bias or family == "qwen2",
        o_bias=bias and family != "qwen2",
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        qk_norm=family in ("qwen3", "qwen3_moe"),
        experts=experts,
        expert_layers=expert_layers,
        **_attention(config, model_dir),
    )


def _load_config(model_dir: Path) -> Any:
    if not (model_dir / "config.json").is_file():
        raise UserError(f"there is no config.json in {model_dir}: give the folder of a Hugging Face model")
    try:
        return AutoConfig.from_pretrained(model_dir, local_files_only=True)
    except Exception as error:
        raise UserError(f"{model_dir / 'config.json'} cannot be read: {type(error).__name__}: {error}") from error


def _check_window(config: Any, model_dir: Path, max_tokens: int) -> None:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    windowed = "sliding_attention" in kinds if kinds is not None else window is not None
    if windowed and window is not None and window < max_tokens:
        raise UserError(
            f"{model_dir} attends over a window of {window} tokens, but sequences have up to {max_tokens}: "
            "the native engine has no windowed attention; shorten prompts or responses"
        )


def _attention(config: Any, model_dir: Path) -> dict[str, Any]:
    """The fields of ModelShape that say how attention works."""
    latent = _latent(config)
    if latent is None:
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        frequencies, scale = rope_angles(config, model_dir, dim)
        return {
            "num_kv_heads": config.num_key_value_heads,
            "head_dim": dim,
            "kv_sides": 2,
            "rope_frequencies": frequencies,
            "rope_scale": scale,
            "attention_scale": dim**-0.5,
        }
    frequencies, scale = rope_angles(config, model_dir, latent.rope_dim)
    return {
        "num_kv_heads": 1,
        "head_dim": latent.kv_rank + latent.rope_dim,
        "kv_sides": 1,
        "rope_frequencies": frequencies,
        "rope_scale": scale,
        "attention_scale": latent_scale(config, latent.nope_dim + latent.rope_dim),
        "latent": latent,
    }


def _latent(config: Any) -> LatentShape | None:
    if config.model_type not in ("deepseek_v2", "deepseek_v3"):
        return None
    return LatentShape(
        q_rank=config.q_lora_rank,
        kv_rank=config.kv_lora_rank,
        nope_dim=config.qk_nope_head_dim,
        rope_dim=config.qk_rope_head_dim,
        value_dim=config.v_head_dim,
        interleaved=config.model_type == "deepseek_v2" or bool(config.rope_interleave),
    )


def _experts(config: Any, model_dir: Path) -> tuple[ExpertShape | None, frozenset[int]]:
    """The experts, and the layers that have them."""
    layers = range(config.num_hidden_layers)
    if config.model_type == "qwen3_moe":
        step, dense = config.decoder_sparse_step, set(config.mlp_only_layers)
        chosen = frozenset(index for index in layers if index not in dense and (index + 1) % step == 0)
        experts = _qwen_experts(config)
    elif config.model_type in ("deepseek_v2", "deepseek_v3"):
        chosen = frozenset(index for index in layers if index >= config.first_k_dense_replace)
        experts = _deepseek_experts(config, model_dir)
    else:
        return None, frozenset()
    if not chosen:
        return None, chosen
    _check_routing(experts, model_dir)
    return experts, chosen


def _qwen_experts(config: Any) -> ExpertShape:
    return ExpertShape(
        num_experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        mlp=config.moe_intermediate_size,
        shared_mlp=0,
        scores="softmax",
        normalised=bool(config.norm_topk_prob),
        scale=1.0,
        num_groups=1,
        top_groups=1,
        best_of=1,
        corrected=False,
        fp32_router=False,
    )


def _deepseek_experts(config: Any, model_dir: Path) -> ExpertShape:
    third = config.model_type == "deepseek_v3"
    if not third and config.topk_method not in V2_METHODS:
        raise UserError(
            f"{model_dir}: topk_method {config.topk_method!r} is not supported by the native engine: "
            f"use a model of type deepseek_v2 with {' or '.join(V2_METHODS)}"
        )
    if not third and config.norm_topk_prob:
        raise UserError(
            f"{model_dir}: norm_topk_prob=true of a deepseek_v2 model is not supported: transformers, which trains it, "
            "leaves the scores as they are; set it to false in config.json"
        )
    grouped = third or config.topk_method == "group_limited_greedy"
    return ExpertShape(
        num_experts=config.n_routed_experts,
        top_k=config.num_experts_per_tok,
        mlp=config.moe_intermediate_size,
        shared_mlp=config.moe_intermediate_size * (config.n_shared_experts or 0),
        scores="sigmoid" if third else "softmax",
        normalised=third and bool(config.norm_topk_prob),
        scale=float(config.routed_scaling_factor),
        num_groups=config.n_group if grouped else 1,
        top_groups=config.topk_group if grouped else 1,
        best_of=2 if third else 1,
        corrected=third,
        fp32_router=True,
    )


def _check_routing(experts: ExpertShape, model_dir: Path) -> None:
    """Refuse a choice of experts that cannot be made."""
    said = (
        f"{experts.top_k} of {experts.num_experts} experts within {experts.top_groups} of {experts.num_groups} groups"
    )
    per_group = experts.num_experts // experts.num_groups
    if experts.num_experts % experts.num_groups or per_group < experts.best_of:
        raise UserError(
            f"{model_dir} chooses {said}: groups must be equal, of {experts.best_of} or more experts; check n_group"
        )
    if not 1 <= experts.top_groups <= experts.num_groups or not 1 <= experts.top_k <= per_group * experts.top_groups:
        raise UserError(f"{model_dir} chooses {said}: there are not so many; check num_experts_per_tok and topk_group")
