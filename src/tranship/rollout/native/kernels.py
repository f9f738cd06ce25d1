"""Compiled kernels for a CPU with AVX-512 (`cpp/`): decode attention, norms, drawing, products.

They are built once for a machine, with the C++ compiler that is there, and kept in the cache folder. Elsewhere, and
where they cannot be built (a warning says why), the engine computes the same with torch, slower.
"""

from __future__ import annotations

import ctypes
import logging
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tranship.models.compiled import compiled, processor_flags
from tranship.types import UserError

LANES = 16
"""Vectors of keys and values must have a multiple of so many elements."""
QUERIES = 12
"""Queries that read keys and values together."""

_SOURCES = Path(__file__).with_name("cpp")
_FLAGS = ["-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"]
_log = logging.getLogger(__name__)


class AttendArguments(ctypes.Structure):
    """Decode attention of one layer, N rows; all tensors contiguous but for the strides between rows (in elements).

    q [N, heads x repeat, dim], keys_in and values_in [N, heads, dim]: of the new tokens. turns: float32 [N, dim], the
    complex factors of each pair, or null where q and keys are turned (and q scaled) already. keys, values [rows,
    heads, room, dim]: the responses' cache, where row n keeps the new token at columns[n]; one and the same where a
    vector is both. prompt_keys, prompt_values [prompts, heads, prompt_room, dim]. units int64 [num_units, 3]: prompt,
    first place in order, number of rows, which all read that prompt. wide: fp32, else bf16. out [N, heads x repeat,
    dim].
    """

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "keys_in", "values_in")),
        *((name, ctypes.c_int64) for name in ("q_stride", "kv_stride")),
        ("turns", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("wide", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        ("room", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("prompt_keys", "prompt_values")),
        ("prompt_room", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("columns", "prompt_lengths", "order", "units")),
        *((name, ctypes.c_int64) for name in ("num_units", "heads", "repeat", "dim")),
        ("out", ctypes.c_void_p),
    ]


class ProductArguments(ctypes.Structure):
    """x [rows, inner] times a packed weight [columns, inner], plus a bias [columns] unless null; all tensors contiguous
    but for the strides between x's rows (in elements). other: as out, added where behind is `ADD`. behind `GATE`: the
    weight is two of the same size, and out is silu of the first product times the second. wide: fp32, else bf16;
    wide_out: the same of out.
    """

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "other")),
        *((name, ctypes.c_int64) for name in ("rows", "inner", "columns", "x_stride")),
        *((name, ctypes.c_int32) for name in ("wide", "wide_out", "behind")),
        ("out", ctypes.c_void_p),
    ]


NOTHING, ADD, GATE = range(3)


class ExpertsArguments(ctypes.Structure):
    """Routed experts of one layer; all tensors contiguous. x [rows, hidden]. chosen int64 and shares float32 [rows,
    top_k]: the experts of each row, and what their results count. gate_up, down int64 [count]: addresses of the packed
    weights [2 mlp, hidden] (of a gate) and [hidden, mlp] of each expert. wide: fp32, else bf16. inputs [rows x top_k,
    hidden], gated [rows x top_k, mlp], made [rows x top_k, hidden]: room. out float32 [rows, hidden]: the sum over a
    row's experts, in their order.
    """

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "chosen", "shares", "gate_up", "down")),
        *((name, ctypes.c_int64) for name in ("rows", "hidden", "mlp", "count", "top_k")),
        ("wide", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("inputs", "gated", "made", "out")),
    ]


class LayerArguments(ctypes.Structure):
    """The packed weights of a layer, its norms' weights and its biases (null where there is none). head_norm: over each
    query and key head, [heads x (repeat + 1), dim]. router [num_experts, hidden]: null for a dense layer; else the
    experts as in `ExpertsArguments`, of width expert_mlp, and how the router's shares are made (see `Kernels.route`).
    """

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("attention_norm", "qkv", "qkv_bias", "head_norm", "o", "o_bias"),
                *("mlp_norm", "gate_up", "gate_up_bias", "down", "down_bias"),
                *("router", "experts_gate_up", "experts_down"),
            )
        ),
        *((name, ctypes.c_int64) for name in ("num_experts", "top_k", "expert_mlp")),
        ("scale", ctypes.c_float),
        ("normalised", ctypes.c_int32),
    ]


class StepArguments(ctypes.Structure):
    """One decode step. attend: all but q, keys and values, which each layer has of its own, and out. layers:
    `LayerArguments` of each. storages int64 [layers, 4]: addresses of each layer's keys, values, prompt_keys and
    prompt_values. x [rows, hidden]: the embedded tokens, written over. logits float32 [rows, vocab]. The rest is room:
    normed [rows, hidden], heads [rows, heads x (repeat + 2) x dim], attended [rows, heads x repeat x dim], gated [rows,
    mlp]; with experts, K of a row: gated for [rows x K, expert_mlp] too, scores [rows, experts], chosen int64 and
    shares float32 [rows, K], inputs and made [rows x K, hidden].
    """

    _fields_ = [
        ("attend", AttendArguments),
        *((name, ctypes.c_void_p) for name in ("layers", "storages")),
        *((name, ctypes.c_int64) for name in ("num_layers", "rows", "hidden", "mlp", "vocab")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("norm", "head")),
        *((name, ctypes.c_void_p) for name in ("x", "normed", "heads", "attended", "gated", "logits")),
        *((name, ctypes.c_void_p) for name in ("scores", "chosen", "shares", "inputs", "made")),
    ]


class Kernels:
    """The functions of a built library."""

    def __init__(self, library: Path) -> None:
        functions = ctypes.CDLL(str(library))
        pointer, number, single = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
        self._attend = functions.tranship_attend
        self._attend.argtypes = [ctypes.POINTER(AttendArguments)]
        self._norm = functions.tranship_norm
        self._norm.argtypes = [pointer, pointer, number, number, number, number, ctypes.c_float, single, pointer]
        self._draw = functions.tranship_draw
        self._draw.argtypes = [pointer, number, number, pointer, pointer, pointer, pointer]
        self._product = functions.tranship_product
        self._product.argtypes = [ctypes.POINTER(ProductArguments)]
        self._pack = functions.tranship_pack
        self._pack.argtypes = [pointer, number, number, single, pointer]
        self._step = functions.tranship_step
        self._step.argtypes = [ctypes.POINTER(StepArguments)]
        self._route = functions.tranship_route
        self._route.argtypes = [pointer, number, number, number, single, ctypes.c_float, pointer, pointer]
        self._experts = functions.tranship_experts
        self._experts.argtypes = [ctypes.POINTER(ExpertsArguments)]
        for function in (
            self._attend,
            self._norm,
            self._draw,
            self._product,
            self._pack,
            self._step,
            self._route,
            self._experts,
        ):
            function.restype = None
        self._set_threads = functions.omp_set_num_threads
        self._set_threads.argtypes = [single]
        self._set_threads.restype = None
        functions.tranship_has_bf16.restype = single
        self._dtypes = (torch.float32, torch.bfloat16) if functions.tranship_has_bf16() else (torch.float32,)

    def attend(self, arguments: AttendArguments) -> None:
        """Keep the new tokens' keys and values, and write what the queries attend to."""
        self._run(self._attend, arguments)

    def has_product(self, weight_OI: torch.Tensor) -> bool:
        """Whether this processor has a fast product for such a weight."""
        return weight_OI.dtype in self._dtypes and weight_OI.shape[1] * weight_OI.element_size() % 4 == 0

    def pack(self, weight_OI: torch.Tensor, gate: bool) -> torch.Tensor:
        """float32 [.]: a copy of the weight in the order that `product` reads. gate: of a gate and what it gates."""
        weight_OI = weight_OI.contiguous()
        columns, words = weight_OI.shape[0], weight_OI.shape[1] * weight_OI.element_size() // 4
        panels = -(-columns // 2 // LANES) if gate else -(-columns // (2 * LANES))
        packed = torch.empty(panels * 2 * LANES * words, dtype=torch.float32)
        self._run(self._pack, weight_OI.data_ptr(), columns, words, gate, packed.data_ptr())
        return packed

    def product(self, arguments: ProductArguments) -> None:
        """Write the product."""
        self._run(self._product, arguments)

    def step(self, arguments: StepArguments) -> None:
        """Write the logits; keep the new tokens' keys and values."""
        self._run(self._step, arguments)

    def route(
        self, logits_NE: torch.Tensor, top_k: int, *, normalised: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each row with the largest of softmax(logits), int64 [N, K], and their shares float32 [N, K]:
        these, over their sum if normalised, times scale. logits float32."""
        logits_NE = logits_NE.contiguous()
        rows, count = logits_NE.shape
        chosen = torch.empty(rows, top_k, dtype=torch.int64)
        shares = torch.empty(rows, top_k)
        self._run(
            self._route,
            logits_NE.data_ptr(),
            rows,
            count,
            top_k,
            normalised,
            scale,
            chosen.data_ptr(),
            shares.data_ptr(),
        )
        return chosen, shares

    def experts(self, arguments: ExpertsArguments) -> None:
        """Write what the experts make of the rows."""
        self._run(self._experts, arguments)

    def norm(self, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        """x [N, ..., D] over its root mean square of the last dimension, times weight ([..., D] without N); all but the
        first dimension lie close together."""
        inner = 1 if x.ndim == 2 else x.shape[1]
        assert x.stride(-1) == 1, x.stride()
        assert weight is None or weight.is_contiguous(), weight
        assert weight is None or weight.dtype == x.dtype, weight
        out = torch.empty(x.shape, dtype=x.dtype)
        self._run(
            self._norm,
            x.data_ptr(),
            None if weight is None else weight.data_ptr(),
            x.shape[0],
            inner,
            x.shape[-1],
            x.stride(0),
            eps,
            x.dtype == torch.float32,
            out.data_ptr(),
        )
        return out

    def draw(
        self, logits_NV: torch.Tensor, temperature_N: np.ndarray, uniform_N: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens int64 [N] and log-probs float32 [N] of softmax(logits / temperature), by uniforms float64 in [0, 1);
        temperature 0 takes the likeliest token and reports temperature 1. A row that is not finite gives nan."""
        assert logits_NV.is_contiguous(), logits_NV.stride()
        assert logits_NV.dtype == torch.float32, logits_NV.dtype
        count = len(logits_NV)
        temperatures = np.ascontiguousarray(temperature_N, np.float32)
        uniforms = np.ascontiguousarray(uniform_N, np.float64)
        tokens, logprobs = np.empty(count, np.int64), np.empty(count, np.float32)
        self._run(
            self._draw,
            logits_NV.data_ptr(),
            count,
            logits_NV.shape[1],
            temperatures.ctypes.data,
            uniforms.ctypes.data,
            tokens.ctypes.data,
            logprobs.ctypes.data,
        )
        return tokens, logprobs

    def _run(self, function: Any, *arguments: Any) -> None:
        """With as many threads as torch would use: it may have brought an OpenMP of its own."""
        self._set_threads(torch.get_num_threads())
        function(*arguments)


def kernels_for(device: torch.device, dim: int) -> Kernels | None:
    """The kernels for keys of `dim` elements on a device; None where torch computes: not a CPU with AVX-512, another
    kind of `dim`, or (with a warning) no working compiler."""
    if device.type != "cpu" or dim % LANES or "avx512f" not in processor_flags().split():
        return None
    return _built()


@lru_cache(maxsize=1)
def _built() -> Kernels | None:
    try:
        return Kernels(build())
    except (OSError, UserError) as error:
        _log.warning("the native rollout engine decodes without compiled kernels, slower: %s", error)
        return None


def build() -> Path:
    """The library, built unless it is in the cache. Raises UserError where that cannot be done."""
    return compiled(_SOURCES, _FLAGS)
