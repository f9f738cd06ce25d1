"""Engines and stages from a worker's spec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tranship.layouts import Share
from tranship.lookup import resolve
from tranship.rollout import ROLLOUT_ENGINES, RolloutEngine
from tranship.rollout.native.engine import NativeEngine
from tranship.rollout.native.leader import LeadingEngine
from tranship.rollout.native.ranks import Ranks
from tranship.rollout.native.recorded import CudaRecorder
from tranship.train import CRITIC_ENGINES, TRAIN_ENGINES, CriticEngine, TrainEngine
from tranship.train.reward_model import RewardModel
from tranship.types import Sampling, UserError
from tranship.worker.spec import WorkerSpec

Decode = Callable[[Sequence[int]], str]


def build_rollout_engine(spec: WorkerSpec, decode: Decode, host: str) -> RolloutEngine:
    """An engine without weights yet: of one process, or of several as the first of them. decode: token ids to text,
    for stop strings. host: the address of this process. UserError if it cannot do what the configuration asks for."""
    rollout, run = spec.config.rollout, spec.config.run
    if rollout.tensor_parallel > 1:
        return LeadingEngine(*build_native_rank(spec, decode, 0), host)
    engine_class = resolve(rollout.engine, ROLLOUT_ENGINES, "rollout.engine")
    settings = _engine_settings(spec, decode)
    if rollout.cuda_graphs:
        settings["record"] = CudaRecorder(torch.device(spec.device))
    engine: RolloutEngine = engine_class(Path(spec.model_dir), **settings)
    if run.deterministic and not engine.capabilities.deterministic:
        raise UserError(
            f"run.deterministic: rollout.engine {rollout.engine!r} on {spec.device} cannot repeat bit for bit: "
            "use rollout.engine=native on a CPU, or deterministic=false"
        )
    return engine


def build_native_rank(spec: WorkerSpec, decode: Decode, rank: int) -> tuple[NativeEngine, Ranks]:
    """One rank of a sampler that has several, and its end of what they compute together."""
    share = Share(rank, spec.config.rollout.tensor_parallel)
    ranks = Ranks(share, torch.device(spec.device), ordered=spec.config.run.deterministic)
    return NativeEngine(Path(spec.model_dir), **_engine_settings(spec, decode), ranks=ranks), ranks


def _engine_settings(spec: WorkerSpec, decode: Decode) -> dict[str, Any]:
    """What every rollout engine is told."""
    rollout = spec.config.rollout
    return {
        "dtype": rollout.dtype,
        "device": spec.device,
        "max_running": rollout.max_running,
        "max_tokens": spec.max_tokens,
        "on_update": rollout.on_update,
        "deterministic": spec.config.run.deterministic,
        "eos_token_ids": spec.eos_token_ids,
        "ignore_eos": rollout.ignore_eos,
        "decode": decode,
    }


def build_train_engine(spec: WorkerSpec) -> TrainEngine:
    """An engine with the weights of the model folder."""
    config = spec.config
    engine_class = resolve(config.train.engine, TRAIN_ENGINES, "train.engine")
    return engine_class(
        Path(spec.model_dir),
        config=config.train,
        temperature=config.train_temperature,
        max_response_tokens=config.rollout.max_response_tokens,
        num_steps=config.train.steps,
        device=spec.device,
        seed=config.run.seed,
        deterministic=config.run.deterministic,
        trust_remote_code=config.model.trust_remote_code,
    )


def build_critic_engine(spec: WorkerSpec) -> CriticEngine:
    """PPO's value model: its own weights, or the policy's with a value head of zeros."""
    config = spec.config
    return resolve(config.train.engine, CRITIC_ENGINES, "train.engine")(
        Path(spec.critic_dir or spec.model_dir),
        config=config.train,
        critic=config.algorithm.critic,
        max_response_tokens=config.rollout.max_response_tokens,
        num_steps=config.train.steps,
        device=spec.device,
        seed=config.run.seed,
        deterministic=config.run.deterministic,
        trust_remote_code=config.model.trust_remote_code,
    )


def build_reward_model(spec: WorkerSpec) -> RewardModel:
    """The model that scores responses."""
    assert spec.reward_model_dir is not None
    return RewardModel(
        Path(spec.reward_model_dir),
        device=spec.device,
        batch_tokens=spec.config.reward.model.batch_tokens,
        dtype=spec.config.train.precision,
        trust_remote_code=spec.config.model.trust_remote_code,
    )


def build_sampling(spec: WorkerSpec) -> Sampling:
    """How training samples are drawn: the recipe's words, and nothing from the model's generation settings."""
    rollout = spec.config.rollout
    return Sampling(
        max_response_tokens=rollout.max_response_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop_token_ids=rollout.stop_token_ids,
        stop_strings=rollout.stop_strings,
    )
