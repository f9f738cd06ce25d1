"""The rollout stage: groups come out whole, with or without a world that answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from tranship.config import AlgorithmConfig
from tranship.data.turns import TurnEncoder
from tranship.dock import Batch, Dock, StageNeeds
from tranship.envs import EnvPool
from tranship.models.tiny import make_tokenizer
from tranship.rollout import GroupRequest
from tranship.stages import Stopwatch
from tranship.stages.episodes import Episodes, Limits, turn_seed
from tranship.stages.rollout import RolloutStage
from tranship.types import Response, SampleId, Sampling, sample_seed

WORLDS = Path(__file__).parents[1] / "envs" / "worlds.py"
TOKENIZER = make_tokenizer(600)
IM_END = 2
MESSAGES = [{"role": "user", "content": "Begin."}]
PROMPT = np.array(TOKENIZER.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False), np.int32)
LIMITS = Limits(max_turns=8, max_turn_tokens=None, max_observation_tokens=64)


def turn_tokens(seed: int) -> list[int]:
    """What the engine below samples: 2 to 5 tokens and an end."""
    rng = np.random.default_rng(seed)
    return [*rng.integers(10, 600, rng.integers(2, 6)).tolist(), IM_END]


class ScriptedEngine:
    """Finishes each request in one step, with tokens that its seed and position alone decide."""

    def __init__(self, num_slots: int = 64, version: int = 0) -> None:
        self.policy_version = version
        self.num_slots = num_slots
        self.waiting: list[tuple[GroupRequest, SampleId, int]] = []
        self.requests: list[GroupRequest] = []
        self.hold = False

    @property
    def num_unfinished(self) -> int:
        return len(self.waiting)

    @property
    def num_free(self) -> int:
        return max(0, self.num_slots - len(self.waiting))

    def submit(self, request: GroupRequest) -> None:
        self.requests.append(request)
        self.waiting += [(request, s, seed) for s, seed in zip(request.samples, request.seeds, strict=True)]

    def step(self) -> list[Response]:
        if self.hold:
            return []
        done, self.waiting = self.waiting, []
        return [self._response(*entry) for entry in reversed(done)]

    def peek(self, starts: dict[SampleId, int]) -> list[Response]:
        return []

    def abort(self, samples: list[SampleId] | None = None) -> list[Response]:
        self.waiting = [entry for entry in self.waiting if samples is not None and entry[1] not in samples]
        return []

    def _response(self, request: GroupRequest, sample: SampleId, seed: int) -> Response:
        ids = turn_tokens(seed)[: request.sampling.max_response_tokens]
        reason = "stop" if ids[-1] == IM_END else "length"
        versions = np.full(len(ids), self.policy_version, np.int32)
        return Response(
            sample, np.array(ids, np.int32), -np.arange(1, len(ids) + 1, dtype=np.float32), versions, reason
        )


class Bench:
    """A dock, the engine above, and the stage between them."""

    def __init__(self, rig: Any, pool: EnvPool | None, limits: Limits, cap: int, engine: ScriptedEngine) -> None:
        self.rig, self.engine, self.cap = rig, engine, cap
        self.pool = pool
        episodes = None
        if pool is not None:
            episodes = Episodes(pool, TurnEncoder(TOKENIZER, [IM_END]), limits=limits, run_seed=7)
        self.stage = RolloutStage(
            rig.client,
            engine,  # type: ignore[arg-type]
            sampling=Sampling(cap, temperature=0.7),
            run_seed=7,
            lease_s=60.0,
            watch=Stopwatch(),
            kinds=("val", "train"),
            world=episodes,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stage.close()

    def admit(self, group_id: int, size: int, kind: str = "train", greedy: bool = False, **script: Any) -> None:
        info = {
            "data_source": "here",
            "ground_truth": 1,
            "extra_info": script,
            "messages": MESSAGES,
            "tools": [],
            "greedy": greedy,
        }
        self.rig.client.admit([(group_id, size, kind, {"prompt": PROMPT, "prompt_info": info})])

    def run(self, num_groups: int = 1) -> list[Batch]:
        """Step until so many groups are at the reward stage."""
        found: list[Batch] = []
        deadline = time.monotonic() + 20
        while len(found) < num_groups:
            assert time.monotonic() < deadline, f"{len(found)} of {num_groups} groups came"
            if not self.stage.step() and self.pool is not None:
                self.pool.wait(0.2)
            batch = self.rig.client.take("advantage_probe", max_groups=1, kinds=("val", "train"))
            if batch is not None:
                found.append(batch)
        return found


@pytest.fixture
def bench(rig: Callable[..., Any]) -> Any:
    opened: list[Bench] = []

    def make(
        world: str | None = None,
        *,
        limits: Limits = LIMITS,
        cap: int = 256,
        engine: ScriptedEngine | None = None,
        num_workers: int = 4,
        step_timeout_s: float = 10.0,
    ) -> Bench:
        made = rig(AlgorithmConfig(), batch=4)
        columns = ("prompt_info", "response", "response_mask", "logprobs", "policy_versions", "finish_reason")
        made.dock = Dock(
            [
                StageNeeds("rollout", ("prompt", "prompt_info")),
                StageNeeds("advantage_probe", (*columns, "rollout_info")),
            ],
            run_id="rollout",
            batch_groups=4,
            staleness=0,
            lease_s=60.0,
            slab_bytes=1 << 18,
            capacity_bytes=1 << 24,
            shared=False,
            ordered=True,
        )
        pool = None
        if world is not None:
            pool = EnvPool(f"{WORLDS}:{world}", num_workers=num_workers, step_timeout_s=step_timeout_s)
        opened.append(Bench(made, pool, limits, cap, engine or ScriptedEngine()))
        return opened[-1]

    yield make
    for one in opened:
        one.stage.close()


def test_a_response_of_one_turn_is_all_the_models(bench: Callable[..., Bench]) -> None:
    made = bench()
    made.admit(3, 2)
    (batch,) = made.run()
    for row, sample in enumerate(batch.ids):
        expected = turn_tokens(sample_seed(7, sample))
        assert batch["response"][row].tolist() == expected
        assert batch["response_mask"][row].tolist() == [True] * len(expected)
        assert batch["logprobs"][row].tolist() == [-1.0 * n for n in range(1, len(expected) + 1)]
        assert batch["policy_versions"][row].tolist() == [0] * len(expected)
        assert batch["finish_reason"][row] == "stop"
        assert batch["rollout_info"][row] == {}
    group = made.rig.dock._flow.table.get(3)
    assert group.tokens == {i: len(PROMPT) + len(batch["response"][i]) for i in range(2)}
    (request,) = made.engine.requests
    assert request.sampling == Sampling(256, temperature=0.7)
    assert request.partials is None


def test_only_groups_of_the_given_kinds_are_taken(bench: Callable[..., Bench]) -> None:
    made = bench()
    made.stage._kinds = ("val",)
    made.admit(0, 1)
    made.admit(1, 1, kind="val", greedy=True)
    (batch,) = made.run()
    assert batch.groups[0].group_id == 1
    assert [request.sampling.temperature for request in made.engine.requests] == [0.0]


def test_the_last_turn_that_is_allowed_does_not_go_on(bench: Callable[..., Bench]) -> None:
    made = bench("Quiz", limits=Limits(max_turns=2, max_turn_tokens=None, max_observation_tokens=64))
    made.admit(2, 1, turns=3)
    made.run()
    assert [request.goes_on for request in made.engine.requests] == [True, False]


def test_turns_and_answers_make_one_sequence(bench: Callable[..., Bench]) -> None:
    made = bench("Quiz")
    made.admit(2, 2, turns=3, say="<|im_end|> more?")
    (batch,) = made.run()
    first, *later = made.engine.requests
    assert first.samples == tuple(batch.ids)
    assert first.prompt_ids.tolist() == PROMPT.tolist()
    assert [len(request.samples) for request in later] == [1] * 4
    assert all(request.goes_on for request in made.engine.requests)
    for row, sample in enumerate(batch.ids):
        ids, mask = batch["response"][row], batch["response_mask"][row]
        written = [turn_tokens(turn_seed(7, sample, turn)) for turn in range(3)]
        assert ids[mask].tolist() == [token for tokens in written for token in tokens]
        text = TOKENIZER.decode(ids[~mask])
        assert text.count("<|im_start|>tool\n<|im_end|> more? ") == 2
        assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
        assert (ids[~mask] < 3).sum() == 2 * 3, "the answers' own special text is no special token"
        assert (batch["logprobs"][row][~mask] == 0.0).all()
        assert (batch["logprobs"][row][mask] < 0.0).all()
        assert (batch["policy_versions"][row] == 0).all()
        assert batch["finish_reason"][row] == "stop"
        info = batch["rollout_info"][row]
        assert ids[info["last_turn"] :].tolist() == written[2]
        assert 0 < info.pop("seconds") < 10
        assert info == {
            "turns": 3,
            "env_reward": 1.5,
            "tool_calls": 2,
            "tool_errors": 1,
            "truncated_observations": 0,
            "last_turn": len(ids) - len(written[2]),
            "env": {"turn": 2, "seen": TOKENIZER.decode(written[2][:-1])},
        }
        mine = [request for request in later if request.samples == (sample,)]
        assert [request.prompt_ids.tolist() for request in mine] == [
            [*PROMPT.tolist(), *ids[: mask.nonzero()[0][len(written[0])]].tolist()],
            [*PROMPT.tolist(), *ids[: info["last_turn"]].tolist()],
        ]
        assert [request.sampling.max_response_tokens for request in mine] == [
            256 - (len(request.prompt_ids) - len(PROMPT)) for request in mine
        ]


def test_no_turn_uses_the_random_numbers_of_another() -> None:
    samples = [SampleId(group, index) for group in range(20) for index in range(4)]
    seeds = [turn_seed(7, sample, turn) for sample in samples for turn in range(-1, 8)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert turn_seed(7, samples[3], 0) == sample_seed(7, samples[3])


def test_what_comes_out_does_not_depend_on_when_the_world_answers(bench: Callable[..., Bench]) -> None:
    def outcome(num_workers: int, pause: float) -> list[Any]:
        made = bench("Quiz", num_workers=num_workers)
        for group in range(3):
            made.admit(group, 3, turns=2 + group, pause=pause)
        rows = []
        for batch in sorted(made.run(3), key=lambda batch: batch.groups[0].group_id):
            for row in range(len(batch)):
                rows.append((batch["response"][row].tolist(), batch["response_mask"][row].tolist()))
        return rows

    assert outcome(1, 0.02) == outcome(4, 0.0) == outcome(4, 0.05)


def test_messages_at_the_start_follow_an_empty_turn(bench: Callable[..., Bench]) -> None:
    made = bench("Quiz")
    made.admit(0, 1, turns=1, first="Listen.")
    (batch,) = made.run()
    ids, mask = batch["response"][0], batch["response_mask"][0]
    opening = TOKENIZER.decode(ids[~mask])
    assert opening == "<|im_end|>\n<|im_start|>user\nListen.<|im_end|>\n<|im_start|>assistant\n"
    assert ids[mask].tolist() == turn_tokens(sample_seed(7, SampleId(0, 0)))
    assert made.engine.requests[0].prompt_ids.tolist() == [*PROMPT.tolist(), *ids[~mask].tolist()]


@pytest.mark.parametrize(
    ("limits", "cap", "script", "turns", "reward"),
    [
        (Limits(2, None, 64), 256, {"turns": 5}, 2, 0.5),
        (Limits(8, None, 64), 4, {"turns": 5}, 1, 0.25),
        (Limits(8, None, 64), 30, {"turns": 9, "say": "x" * 100}, 1, 0.25),
    ],
    ids=["turns", "tokens of a turn", "room after an answer"],
)
def test_limits_end_a_sample_with_length(
    bench: Callable[..., Bench], limits: Limits, cap: int, script: dict, turns: int, reward: float
) -> None:
    made = bench("Quiz", limits=limits, cap=cap)
    made.admit(0, 4, **script)
    (batch,) = made.run()
    longest = max(range(4), key=lambda row: len(batch["response"][row]))
    for row in range(4):
        assert len(batch["response"][row]) <= cap
        assert batch["rollout_info"][row]["turns"] == turns
        assert batch["rollout_info"][row]["env_reward"] == reward
        assert batch["response_mask"][row][-1], "a sample does not end in something that no turn answers"
    assert batch["finish_reason"][longest] == "length"


def test_a_cut_turn_is_closed_by_tokens_that_are_not_trained(bench: Callable[..., Bench]) -> None:
    made = bench("Quiz", limits=Limits(8, 2, 64))
    made.admit(0, 1, turns=2)
    (batch,) = made.run()
    ids, mask = batch["response"][0], batch["response_mask"][0]
    assert mask.tolist() == [True, True, *[False] * (len(ids) - 4), True, True]
    assert ids[2] == IM_END
    assert batch["finish_reason"][0] == "length"
    assert [request.sampling.max_response_tokens for request in made.engine.requests] == [2, 2]


def test_a_long_answer_is_cut_and_counted(bench: Callable[..., Bench]) -> None:
    made = bench("Quiz", limits=Limits(8, None, 5))
    made.admit(0, 1, turns=2, say="one two three four five six seven")
    (batch,) = made.run()
    mask = batch["response_mask"][0]
    frame = TurnEncoder(TOKENIZER, [IM_END]).suffix(MESSAGES, [{"role": "tool", "content": ""}], ended=True)
    assert 0 < (~mask).sum() - len(frame) <= 5
    assert batch["rollout_info"][0]["truncated_observations"] == 1


def test_a_session_that_fails_costs_its_own_sample(bench: Callable[..., Bench]) -> None:
    made = bench("Quiz")
    for group, fault in enumerate((2, 0, -1)):
        made.admit(group, 2, turns=3, fault=fault)
    by_group = {batch.groups[0].group_id: batch for batch in made.run(3)}
    for row in range(2):
        late = by_group[0]["rollout_info"][row]
        assert (late["invalid"], late["turns"]) == ("RuntimeError: the world is gone", 2)
        assert by_group[0]["response_mask"][row].sum() > 0
        never = by_group[1]["rollout_info"][row]
        assert (never["invalid"], never["turns"]) == ("RuntimeError: no world today", 0)
        assert len(by_group[1]["response"][row]) == 0
        assert "invalid" not in by_group[2]["rollout_info"][row]


def test_a_world_that_neither_answers_nor_ends_is_at_fault(bench: Callable[..., Bench]) -> None:
    made = bench("Silent")
    made.admit(0, 1)
    (batch,) = made.run()
    assert "neither answered nor ended" in batch["rollout_info"][0]["invalid"]


def test_the_stage_does_not_wait_for_a_slow_world(bench: Callable[..., Bench]) -> None:
    made = bench("Quiz", step_timeout_s=0.3)
    made.admit(0, 1, pause=60.0)
    made.admit(1, 1)
    start = time.monotonic()
    assert made.stage.step()
    assert time.monotonic() - start < 0.25
    slow, quick = sorted(made.run(2), key=lambda batch: batch.groups[0].group_id)
    assert "timed out after 0.3 s" in slow["rollout_info"][0]["invalid"]
    assert quick["finish_reason"] == ["stop"]


def test_samples_in_the_world_keep_their_places(bench: Callable[..., Bench]) -> None:
    made = bench("Quiz", engine=ScriptedEngine(num_slots=4))
    for group in range(4):
        made.admit(group, 2, turns=2, pause=0.1)
    made.stage.step()
    assert len(made.stage._running) == 2
    assert len(made.run(4)) == 4


def test_samples_that_wait_for_a_slot_make_no_sampler_faster(bench: Callable[..., Bench]) -> None:
    made = bench(engine=ScriptedEngine(num_slots=2))
    made.engine.hold = True
    made.admit(0, 5)
    made.stage.step()
    assert made.engine.num_unfinished == 5
    assert made.stage._load.slots == 2


def test_a_lost_group_ends_its_sessions(bench: Callable[..., Bench]) -> None:
    made = bench("Quiz", engine=ScriptedEngine(version=0))
    assert made.pool is not None
    made.admit(0, 2, turns=2)
    made.admit(1, 2, turns=2, pause=0.3)
    made.stage.step()
    made.rig.client.drop([1], "a test", made.stage._running[1].lease)
    made.stage._forget_lost_groups()
    (batch,) = made.run()
    assert batch.groups[0].group_id == 0
    episodes = made.stage._world
    assert episodes is not None
    assert (episodes._running, episodes._by_session, episodes._opening) == ({}, {}, {})
    assert not made.stage.step()
    made.pool.wait(0.5)
    assert not made.stage.step()
    assert made.pool.num_pending == 0


def test_the_oldest_version_is_that_of_the_models_own_tokens(bench: Callable[..., Bench]) -> None:
    made = bench("Quiz")
    episodes = made.stage._world
    assert episodes is not None
    assert made.pool is not None
    sample = SampleId(0, 0)
    info = {"extra_info": {"turns": 2}, "messages": MESSAGES, "tools": []}
    episodes.start([sample], PROMPT, info, Sampling(256))
    for version in (4, 5):
        made.pool.wait(10)
        ((request,), outcomes) = episodes.advance(policy_version=version)
        assert outcomes == []
        made.engine.policy_version = version
        made.engine.submit(request)
        (response,) = made.engine.step()
        episodes.turn_ended(response)
    made.pool.wait(10)
    (_, (outcome,)) = episodes.advance(policy_version=6)
    versions = outcome.response.policy_versions
    first = len(turn_tokens(turn_seed(7, sample, 0)))
    assert versions[:first].tolist() == [4] * first
    assert set(versions[first:].tolist()) == {5}
