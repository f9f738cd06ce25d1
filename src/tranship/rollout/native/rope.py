"""Rotary embeddings from a config: angles per position, and the factors that a scaling puts on them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tranship.types import UserError

SUPPORTED_ROPES = ("default", "linear", "llama3", "yarn")


def rope_angles(config: Any, model_dir: Path, dim: int) -> tuple[torch.Tensor, float]:
    """(float32 [dim / 2]: radians per position, the factor on both rotated vectors) of vectors with `dim` elements.

    Raises UserError for a scaling that is not supported.
    """
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
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return 1.0 / (config.rope_parameters["rope_theta"] ** exponents), 1.0


def latent_scale(config: Any, dim: int) -> float:
    """What the scores of a DeepSeek layer with keys of `dim` elements are multiplied by.

    It is dim**-0.5, times the square of YaRN's factor for all dimensions where a rotary scaling has one (Peng et al.
    2023, "YaRN", section 3.4, as DeepSeek-V2 uses it with `mscale_all_dim`).
    """
    scaling = config.rope_parameters
    every = scaling.get("mscale_all_dim", 0)
    if scaling.get("rope_type", "default") == "default" or not every or scaling["factor"] <= 1:
        return dim**-0.5
    return dim**-0.5 * (0.1 * every * math.log(scaling["factor"]) + 1.0) ** 2
