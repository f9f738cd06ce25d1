"""A model folder to what the endpoint serves: an engine with its weights, a tokenizer, a name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from tranship.lookup import resolve
from tranship.models.folder import ModelInfo, check
from tranship.models.tokenizer import load_tokenizer
from tranship.rollout import ROLLOUT_ENGINES, RolloutEngine
from tranship.rollout.native.folder import load_folder
from tranship.runtime.device import num_cores, resolve_device
from tranship.serve.text import decoder
from tranship.types import UserError


@dataclass(frozen=True)
class EngineSettings:
    """How the engine runs. engine: an entry of ROLLOUT_ENGINES. max_running: samples decoded at the same time.
    max_tokens: the longest prompt and response together; None: the model's context. threads: None: all cores.
    deterministic: an answer does not depend, to the bit, on what else is asked (fp32, a CPU, one thread)."""

    engine: str = "native"
    dtype: Literal["fp32", "bf16"] = "fp32"
    device: str = "auto"
    max_running: int = 16
    max_tokens: int | None = None
    threads: int | None = None
    deterministic: bool = False


@dataclass(frozen=True)
class Served:
    """What requests are about. name: what they call the model. max_tokens: its context as served.

    tokenizer makes texts, prompt_tokenizer token ids; the engine has one of its own. They work in different threads,
    and a tokenizer keeps its last settings in itself.
    """

    name: str
    tokenizer: PreTrainedTokenizerBase
    prompt_tokenizer: PreTrainedTokenizerBase
    max_tokens: int


@dataclass(frozen=True)
class Loaded:
    """A model that was loaded to be served."""

    served: Served
    engine: RolloutEngine
    info: ModelInfo
    settings: EngineSettings

    def lines(self) -> list[str]:
        """What is served, for people."""
        info, settings = self.info, self.settings
        return [
            f"model     {info.path} ({info.architecture}, {info.num_parameters / 1e6:.1f} M parameters, policy version "
            f"{self.engine.policy_version}, ends at {list(info.eos_token_ids)})",
            f"engine    {settings.engine}, {settings.dtype} on {settings.device}, {settings.threads} threads, "
            f"{settings.max_running} samples at a time, a context of {self.served.max_tokens} tokens"
            + (", deterministic" if settings.deterministic else ""),
        ]


def load_served(folder: Path, name: str, settings: EngineSettings, policy_version: int = 0) -> Loaded:
    """The model of a Hugging Face folder, ready to be asked; its weights count as `policy_version`.

    Raises UserError for a folder, a device or settings that cannot be used.
    """
    info = check(folder, need_chat_template=False)
    max_tokens = settings.max_tokens or info.context_length
    if max_tokens > info.context_length:
        raise UserError(f"--max-tokens {max_tokens} exceeds the model's context of {info.context_length}: lower it")
    settings = _resolved(settings)
    torch.set_num_threads(settings.threads or 1)
    tokenizer, prompt_tokenizer, engine_tokenizer = (load_tokenizer(folder) for _ in range(3))
    engine_class = resolve(settings.engine, ROLLOUT_ENGINES, "--engine")
    engine: RolloutEngine = engine_class(
        folder,
        dtype=settings.dtype,
        device=settings.device,
        max_running=settings.max_running,
        max_tokens=max_tokens,
        on_update="recompute",
        deterministic=settings.deterministic,
        eos_token_ids=info.eos_token_ids,
        decode=decoder(engine_tokenizer, skip_special_tokens=False),
    )
    if settings.deterministic and not engine.capabilities.deterministic:
        raise UserError(
            f"--deterministic: the engine {settings.engine!r} on {settings.device} cannot repeat bit for bit: use "
            "--engine native on a CPU, or leave it out"
        )
    if settings.deterministic:
        torch.use_deterministic_algorithms(True)
    load_folder(engine, folder, policy_version)
    return Loaded(Served(name, tokenizer, prompt_tokenizer, max_tokens), engine, info, settings)


def _resolved(settings: EngineSettings) -> EngineSettings:
    """The same with the device and the threads that are meant."""
    threads = settings.threads or (1 if settings.deterministic else num_cores())
    return replace(settings, device=resolve_device(settings.device), threads=threads)
