"""The update of a batch: what the engines are given, who is trained when, and what a lost lease does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.unit.stages.conftest import Rig, scored
from tranship.algorithms.objective import make_loss
from tranship.config import AlgorithmConfig, CorrectionConfig, CriticConfig
from tranship.stages import Stopwatch
from tranship.stages.train import Critic, TrainStage
from tranship.types import RunError, SampleId, TrainBatch


class FakeEngine:
    """Notes what it is to train on; calls the fence as an engine does before each of its optimizer steps."""

    def __init__(self, steps: int = 1, before: Callable[[], None] = lambda: None) -> None:
        self.batches: list[TrainBatch] = []
        self.applied = 0
        self.skipped = 0
        self._steps = steps
        self._before = before

    def skip(self) -> None:
        self.skipped += 1

    def logprobs(self, prompts: Any, group_of: Any, responses: Any) -> list[np.ndarray]:
        return [np.full(len(ids), -2.0 - self.applied, dtype=np.float32) for ids in responses]

    def update(self, batch: TrainBatch, loss: Any, fence: Callable[[], None] = lambda: None) -> dict[str, float]:
        self.batches.append(batch)
        for _ in range(self._steps):
            self._before()
            fence()
            self.applied += 1
        return {"updated": 1.0}


def stage_of(rig: Rig, algorithm: AlgorithmConfig, engine: FakeEngine, critic: Critic | None = None) -> TrainStage:
    return TrainStage(
        rig.client,
        engine,
        make_loss(algorithm),
        reads=rig.row("train").reads,
        groups_per_step=1,
        lease_s=60.0,
        whiten_advantages=algorithm.whiten_advantages,
        with_proximal=algorithm.correction.name != "none",
        critic=critic,
        emit=rig.events.append,
        watch=Stopwatch(),
        check_stop=lambda: None,
    )


def ready(rig: Rig, group_id: int, **columns: list[Any]) -> None:
    """A group of two samples, of 2 and 3 tokens, that only the update is still missing."""
    rig.admit(group_id, 2)
    rig.sampled(group_id, [2, 3], [scored(1.0), scored(0.0)])
    rows = [SampleId(group_id, 0), SampleId(group_id, 1)]
    advantages = [np.array([1, 1], np.float32), np.array([0, 0, 4], np.float32)]
    masks = [np.array([True, True]), np.array([True, False, True])]
    rig.client.put(rows, {"advantages": advantages, "loss_mask": masks, **columns})


def per_token(value: float) -> list[np.ndarray]:
    return [np.full(length, value, dtype=np.float32) for length in (2, 3)]


def test_the_engine_gets_what_the_table_says(rig: Callable[..., Rig]) -> None:
    algorithm = AlgorithmConfig(correction=CorrectionConfig(name="decoupled"))
    made = rig(algorithm, batch=1)
    ready(made, 0)
    engine = FakeEngine()
    assert stage_of(made, algorithm, engine).step()
    batch = engine.batches[0]
    assert batch.proximal_logprobs is not None
    assert [list(row) for row in batch.proximal_logprobs] == [[-2, -2], [-2, -2, -2]]
    assert [list(row) for row in batch.logprobs] == [[-1, -1], [-1, -1, -1]]
    assert batch.ref_logprobs is batch.values is batch.returns is None
    assert batch.on_policy is not None
    assert all(row.all() for row in batch.on_policy)
    assert made.events[0]["staleness"] == [0, 0]
    assert made.events[0]["metrics"]["updated"] == 1.0
    assert made.dock.ledger.trained == 1


def test_whitening_is_over_the_unmasked_tokens_of_the_batch(rig: Callable[..., Rig]) -> None:
    algorithm = AlgorithmConfig(name="reinforce_pp")
    made = rig(algorithm, batch=1)
    ready(made, 0)
    engine = FakeEngine()
    stage_of(made, algorithm, engine).step()
    kept = np.concatenate(
        [row[mask] for row, mask in zip(engine.batches[0].advantages, engine.batches[0].response_mask, strict=True)]
    )
    # 1, 1, 0, 4
    assert kept == pytest.approx(np.array([-0.5, -0.5, -1.5, 2.5]) / np.std([1, 1, 0, 4], ddof=1), abs=1e-6)


def test_a_window_without_signal_counts_for_the_schedule(rig: Callable[..., Rig]) -> None:
    algorithm = AlgorithmConfig()
    made = rig(algorithm, batch=1)
    made.admit(0, 2)
    made.client.drop([0], "filtered", None)
    engine = FakeEngine()
    assert stage_of(made, algorithm, engine).step()
    assert (engine.applied, engine.skipped) == (0, 1)
    assert made.events[0]["groups"] == [0]


def ppo(rig: Callable[..., Rig], warmup: int, critic_engine: FakeEngine) -> tuple[Rig, AlgorithmConfig, Critic]:
    algorithm = AlgorithmConfig(name="ppo", critic=CriticConfig(warmup_steps=warmup))
    made = rig(algorithm, batch=1)
    return made, algorithm, Critic(critic_engine, lambda inputs, totals: None, warmup)


def test_the_critic_alone_is_trained_while_it_warms_up(rig: Callable[..., Rig]) -> None:
    policy, value = FakeEngine(), FakeEngine()
    made, algorithm, critic = ppo(rig, 1, value)
    stage = stage_of(made, algorithm, policy, critic)
    for group_id in (0, 1):
        ready(made, group_id, values=per_token(0.5), returns=per_token(1.0))
        assert stage.step()
        made.client.advance(group_id + 1)
    assert (policy.applied, value.applied) == (1, 2)
    assert (policy.skipped, value.skipped) == (1, 0), "the schedule goes on while the policy waits"
    assert value.batches[0].returns is not None


def test_a_lease_lost_before_the_first_step_changes_nothing(rig: Callable[..., Rig]) -> None:
    algorithm = AlgorithmConfig()
    made = rig(algorithm, batch=1)
    ready(made, 0)
    engine = FakeEngine(before=lambda: made.client.retire("test"))
    assert stage_of(made, algorithm, engine).step()
    assert engine.applied == 0
    assert made.events == []
    assert made.dock.ledger.trained == 0


def test_a_lease_lost_between_policy_and_critic_stops_the_run(rig: Callable[..., Rig]) -> None:
    value = FakeEngine()
    made, algorithm, critic = ppo(rig, 0, value)
    value._before = lambda: made.client.retire("test")
    ready(made, 0, values=per_token(0.5), returns=per_token(1.0))
    with pytest.raises(RunError, match="between two of its optimizer steps"):
        stage_of(made, algorithm, FakeEngine(), critic).step()
    assert value.applied == 0
