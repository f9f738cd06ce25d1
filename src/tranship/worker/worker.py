"""A process that hosts stages: it gives each of them one step after another, and runs the coordinator's commands
between two steps. It decides nothing."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

from tranship.algorithms.estimate import make_estimate
from tranship.algorithms.objective import make_loss, make_value_loss
from tranship.dock import Batch
from tranship.layouts import Piece
from tranship.models.tokenizer import decode_response, load_tokenizer
from tranship.observe import rss_bytes
from tranship.observe.profile import Profiler
from tranship.observe.snapshot import snapshots_wanted
from tranship.rewards import make_pool
from tranship.rollout import RolloutEngine
from tranship.rollout.native.leader import Door, LeadingEngine
from tranship.runtime import Context, ServiceProxy
from tranship.stages import Stage, Stopwatch
from tranship.stages.advantage import AdvantageStage
from tranship.stages.env_setup import make_episodes
from tranship.stages.forward import Compute, ForwardStage
from tranship.stages.recorded import RecordedStage
from tranship.stages.reward import RewardStage
from tranship.stages.rollout import RolloutStage, World
from tranship.stages.train import Critic, TrainStage
from tranship.train import CriticEngine, TrainEngine
from tranship.types import RunError
from tranship.worker.build import (
    build_critic_engine,
    build_reward_model,
    build_rollout_engine,
    build_sampling,
    build_train_engine,
)
from tranship.worker.describe import sample_record, sampling_record, token_record
from tranship.worker.dock_service import DockConnection
from tranship.worker.rank import as_death
from tranship.worker.spec import WEIGHTS, WorkerSpec
from tranship.worker.weights import (
    FetchedWeights,
    LocalWeights,
    Probe,
    PublishedWeights,
    WeightsReady,
    plan_weights,
)

if TYPE_CHECKING:
    from tranship.worker.endpoint import InRunEndpoint


class _Stopped(Exception):
    """The run is to stop, in the middle of an update: the weights are still those of the last completed step."""


class Worker:
    """The stages of one process, their engines, and their side of the dock."""

    def __init__(self, spec: WorkerSpec, dock: ServiceProxy, context: Context) -> None:
        torch.set_num_threads(spec.num_threads)
        disable_progress_bar()
        self._deterministic_before = torch.are_deterministic_algorithms_enabled()
        if spec.config.run.deterministic:
            torch.use_deterministic_algorithms(True)
        self._spec = spec
        self._context = context
        self._watch = Stopwatch()
        self._stop = threading.Event()
        self._with_tokens = snapshots_wanted(spec.config.observe)
        self._batches_trained = 0
        self._profiler = Profiler(Path(spec.config.run.dir), context.name, spec.config.observe.profile_steps)
        self._tokenizer = load_tokenizer(Path(spec.model_dir), spec.config.model.trust_remote_code)
        self._connection = DockConnection(dock, spec.config, context)
        self._dock = self._connection.client
        has_weights = "train" in spec.stages or WEIGHTS in spec.stages
        self._trainer: TrainEngine | None = build_train_engine(spec) if has_weights else None
        self._critic: CriticEngine | None = build_critic_engine(spec) if "value" in spec.stages else None
        self._sampler: RolloutEngine | None = (
            build_rollout_engine(spec, self._text_of, context.host) if "rollout" in spec.stages else None
        )
        self._endpoint = self._make_endpoint()
        self._local: LocalWeights | None = None
        self._published: PublishedWeights | None = None
        self._fetched: FetchedWeights | None = None
        if self._trainer is not None and self._sampler is not None:
            self._local = LocalWeights(self._trainer, self._sampler, self._probe(), self._watch)
        self._stages = [self._build_stage(name) for name in spec.stages if name != WEIGHTS]
        if self._endpoint is not None:
            self._endpoint.start()

    def poll(self) -> bool:
        """One pass over the stages; returns whether any did something."""
        progress = False
        try:
            if isinstance(self._sampler, LeadingEngine):
                with as_death(self._context.name):
                    self._sampler.check()
            for stage in self._stages:
                if self._stop.is_set():
                    return False
                with as_death(self._context.name):
                    progress = stage.step() or progress
        except _Stopped:
            return False
        return progress

    def interrupt(self) -> None:
        """Begin no further step, and give up an update that is under way before it changes a weight. Any thread."""
        self._stop.set()

    def close(self) -> None:
        """End the stages; the processes of the reward pool end too."""
        self._profiler.close()
        if self._endpoint is not None:
            self._endpoint.close()
        for stage in self._stages:
            stage.close()
        if isinstance(self._sampler, LeadingEngine):
            self._sampler.close()
        self._connection.close()
        torch.use_deterministic_algorithms(self._deterministic_before)

    # Commands of the coordinator

    def pieces(self) -> list[Piece]:
        """Where this worker's weights lie: the trainer's here, or the sampler's where there is no trainer."""
        engine = self._trainer or self._sampler
        assert engine is not None
        return engine.pieces()

    def lead(self, doors: list[Door]) -> None:
        """Meet the other ranks of this sampler, given in their order."""
        assert isinstance(self._sampler, LeadingEngine)
        with as_death(self._context.name):
            self._sampler.lead(doors)

    def connect_weights(self, source: list[Piece], targets: list[list[Piece]]) -> None:
        """Plan the way from the trainer's pieces to those of a sampler's ranks; this worker is the trainer, or the
        first rank."""
        plan, objects = plan_weights(source, targets), self._context.objects
        if self._trainer is not None:
            self._published = PublishedWeights(self._trainer, plan, self._probe(), objects.put, self._watch)
        else:
            assert self._sampler is not None
            tell = self._sampler.fill if isinstance(self._sampler, LeadingEngine) else None
            self._fetched = FetchedWeights(self._sampler, plan, self._probe(), objects.get, self._watch, tell)

    def publish_weights(self, version: int) -> WeightsReady | None:
        """Make the current weights version `version`: in place where the sampler is here, else as buckets."""
        if self._local is not None:
            self._local.publish(version)
            return None
        assert self._published is not None, "samplers have not said where they want their weights"
        return self._published.publish(version)

    def announce_weights(self, ready: WeightsReady) -> None:
        """A version can be fetched; the rollout stage does so before its next step."""
        assert self._fetched is not None, "the way of the weights has not been planned"
        self._fetched.announce(ready)

    def fetch_weights(self, ready: WeightsReady) -> None:
        """Use this version when the call returns."""
        self.announce_weights(ready)
        with as_death(self._context.name):
            self._update_weights()

    def batches_trained(self) -> int:
        """Batches that the weights here have been trained on since `load`, or since the start."""
        assert self._trainer is not None
        return self._batches_trained

    def save(self, folder: str) -> None:
        """Write the trainer's state and a Hugging Face folder."""
        assert self._trainer is not None
        self._trainer.save(Path(folder) / "trainer")
        if self._critic is not None:
            self._critic.save(Path(folder) / "critic")
        self._trainer.export(Path(folder) / "model")

    def load(self, folder: str) -> None:
        """Take over what `save` wrote."""
        assert self._trainer is not None
        self._trainer.load(Path(folder) / "trainer")
        if self._critic is not None:
            self._critic.load(Path(folder) / "critic")

    def export(self, folder: str) -> None:
        """Write the current weights as a Hugging Face folder."""
        assert self._trainer is not None
        self._trainer.export(Path(folder))

    def profile_step(self, step: int) -> None:
        """Step `step` begins here, if it is one that is to be profiled; the one before it is written."""
        self._profiler.begin(step)

    def timings(self) -> dict[str, float]:
        """Seconds by stage since the last call, and this process's resident memory now (`rss_bytes`)."""
        return {**self._watch.drain(), "rss_bytes": float(rss_bytes())}

    # How it is put together

    def _probe(self) -> Probe:
        rollout = self._spec.config.rollout
        bf16 = "bf16" in (rollout.dtype, self._spec.config.train.precision)
        return Probe(self._spec.probe_ids, self._spec.config.train_temperature, "bf16" if bf16 else "fp32")

    def _update_weights(self) -> bool:
        return self._fetched is not None and self._fetched.update()

    def _text_of(self, token_ids: Sequence[int]) -> str:
        return decode_response(self._tokenizer, np.asarray(token_ids, dtype=np.int64))

    def _decode(self, token_ids: np.ndarray) -> str:
        return decode_response(self._tokenizer, token_ids)

    def _describe(self, batch: Batch, row: int) -> dict[str, Any]:
        tokens = token_record(batch, row, self._spec.stage("advantage").reads) if self._with_tokens else {}
        return {**sample_record(batch, row, self._decode), **sampling_record(batch, row), **tokens}

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise _Stopped

    def _emit(self, event: dict[str, Any]) -> None:
        if event["kind"] == "trained":
            self._batches_trained += 1
        self._context.emit(event)

    def _build_stage(self, name: str) -> Stage:
        if name == "rollout":
            return self._rollout_stage()
        if name == "reward":
            return self._reward_stage()
        if name in ("reference", "value", "reward_model"):
            return self._forward_stage(name)
        if name == "recorded":
            groups = self._spec.config.groups_per_step
            return RecordedStage(self._dock, max_groups=groups, emit=self._emit, watch=self._watch)
        if name == "advantage":
            return self._advantage_stage()
        if name == "train":
            return self._train_stage()
        raise RunError(f"no stage is called {name!r}")

    def _make_endpoint(self) -> InRunEndpoint | None:
        if self._sampler is None or not self._spec.config.serve.enabled:
            return None
        # It needs packages of an extra.
        from tranship.worker.endpoint import InRunEndpoint

        return InRunEndpoint(self._spec, self._context.name, self._sampler, self._context.wakeup)

    def _rollout_stage(self) -> Stage:
        assert self._sampler is not None
        config = self._spec.config
        return RolloutStage(
            self._dock,
            self._sampler if self._endpoint is None else self._endpoint.engine,
            sampling=build_sampling(self._spec),
            run_seed=config.run.seed,
            kinds=self._spec.stage("rollout").kinds,
            lease_s=config.dock.lease_s,
            watch=self._watch,
            update=self._update_weights,
            world=self._world(),
        )

    def _world(self) -> World | None:
        """What makes samples of several turns: agents at the endpoint, or the recipe's environment."""
        config = self._spec.config
        if self._endpoint is not None and self._endpoint.agents is not None:
            return self._endpoint.agents
        if config.env.name is None:
            return None
        log_file = Path(config.run.dir) / "env.log"
        log_file.parent.mkdir(parents=True, exist_ok=True)
        return make_episodes(
            config.env,
            self._tokenizer,
            end_ids=self._spec.eos_token_ids,
            template_args=config.data.template_args,
            run_seed=config.run.seed,
            wakeup=self._context.wakeup,
            log_file=log_file,
        )

    def _reward_stage(self) -> Stage:
        config = self._spec.config
        log_file = Path(config.run.dir) / "reward.log"
        log_file.parent.mkdir(parents=True, exist_ok=True)
        pool = None
        if config.reward.function != "none" or config.reward.terms:
            pool = make_pool(config.reward, wakeup=self._context.wakeup, log_file=log_file)
        return RewardStage(
            self._dock,
            pool,
            reward=config.reward,
            max_response_tokens=config.rollout.max_response_tokens,
            kinds=self._spec.stage("reward").kinds,
            decode=self._decode,
            lease_s=config.dock.lease_s,
            watch=self._watch,
        )

    def _forward_stage(self, name: str) -> Stage:
        row = self._spec.stage(name)
        if name == "reference":
            compute: Compute = build_train_engine(self._spec).logprobs
        elif name == "value":
            assert self._critic is not None
            compute = self._critic.values
        else:
            compute = build_reward_model(self._spec).scores
        return ForwardStage(
            name,
            row.writes[0],
            self._dock,
            compute,
            kinds=row.kinds,
            # One group at a time: which groups are ready together depends on the placement, and a row's last bits on
            # what it is packed with.
            max_groups=1 if self._spec.config.run.deterministic else self._spec.config.groups_per_step,
            watch=self._watch,
        )

    def _advantage_stage(self) -> Stage:
        algorithm = self._spec.config.algorithm
        return AdvantageStage(
            self._dock,
            reads=self._spec.stage("advantage").reads,
            estimate=make_estimate(algorithm),
            keep_without_signal=algorithm.keep_groups_without_signal,
            describe=self._describe,
            emit=self._emit,
            watch=self._watch,
        )

    def _train_stage(self) -> Stage:
        config = self._spec.config
        assert self._trainer is not None
        critic = None
        if self._critic is not None:
            settings = config.algorithm.critic
            critic = Critic(self._critic, make_value_loss(settings), settings.warmup_steps)
        return TrainStage(
            self._dock,
            self._trainer,
            make_loss(config.algorithm),
            reads=self._spec.stage("train").reads,
            groups_per_step=config.groups_per_step,
            lease_s=config.dock.lease_s,
            whiten_advantages=config.algorithm.whiten_advantages,
            with_proximal=config.algorithm.correction.name != "none" and config.train.minibatches > 1,
            critic=critic,
            emit=self._emit,
            watch=self._watch,
            check_stop=self._check_stop,
        )
