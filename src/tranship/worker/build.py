"""Engines and stages from a worker's spec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tranship.lookup import resolve
from tranship.rollout import ROLLOUT_ENGINES, RolloutEngine
from tranship.train import CRITIC_ENGINES, TRAIN_ENGINES, CriticEngine, TrainEngine
from tranship.train.reward_model import RewardModel
from tranship.types import Sampling, UserError
from tranship.worker.spec import WorkerSpec


def build_rollout_engine(spec: WorkerSpec, decode: Callable[[Sequence[int]], str]) -> RolloutEngine:
    """An engine without weights yet. decode: token ids to text, for stop strings. UserError if it cannot do what the
    configuration asks for."""
    rollout, run = spec.config.rollout, spec.config.run
    engine_class = resolve(rollout.engine, ROLLOUT_ENGINES, "rollout.engine")
    engine: RolloutEngine = engine_class(
        Path(spec.model_dir),
        dtype=rollout.dtype,
        device=spec.device,
        max_running=rollout.max_running,
        max_tokens=spec.max_tokens,
        on_update=rollout.on_update,
        deterministic=run.deterministic,
        eos_token_ids=spec.eos_token_ids,
        ignore_eos=rollout.ignore_eos,
        decode=decode,
    )
    if run.deterministic and not engine.capabilities.deterministic:
        raise UserError(
            f"run.deterministic: rollout.engine {rollout.engine!r} on {spec.device} cannot repeat bit for bit: "
            "use rollout.engine=native on a CPU, or deterministic=false"
        )
    return engine


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
