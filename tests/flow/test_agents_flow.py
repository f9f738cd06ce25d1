"""Agents make the samples of a run through its endpoint: their turns are trained, and the run loses nothing to them."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from flow_helpers import read_jsonl, wait_until
from watched_run import WatchedRun, check_whole

import tranship
from tranship.config.load import loads
from tranship.trainer.evaluate import prepare
from tranship.trainer.preflight import preflight
from tranship.types import UserError

Recipe = Callable[..., dict[str, Any]]
FOUND_S = 120


def agent_recipe(recipe: Recipe, **changes: Any) -> dict[str, Any]:
    return recipe(
        **{
            "run__deterministic": False,
            "serve": {"enabled": True, "agents": True, "agent_timeout_s": 60},
            "reward": {"function": "none"},
            "rollout__max_response_tokens": 96,
            "data__max_prompt_tokens": 256,
            "placement__threads_per_process": 1,
            "train__precision": "fp32",
            "rollout__dtype": "fp32",
            **changes,
        }
    )


class Agent(threading.Thread):
    """Claims samples as long as a run answers, and makes each of them by `make`. comes_back: it looks for an endpoint
    again when nobody answers, until `ended` is set."""

    def __init__(
        self, run_dir: Path, make: Callable[[Agent, dict[str, Any]], None], *, comes_back: bool = False
    ) -> None:
        super().__init__(daemon=True)
        self._run_dir = run_dir
        self._make = make
        self._comes_back = comes_back
        self.ended = threading.Event()
        self.samples: list[dict[str, Any]] = []
        self.turns: list[Any] = []
        self.failure: Exception | None = None

    def run(self) -> None:
        try:
            where = self._where()
            while where is not None:
                self._work(where)
                where = self._where() if self._comes_back else None
        except Exception as error:
            self.failure = error

    def _work(self, where: dict[str, str]) -> None:
        """Until nobody answers."""
        self.model = where["model"]
        self.client = openai.OpenAI(base_url=where["url"], api_key=where["token"], max_retries=0, timeout=60)
        with contextlib.suppress(openai.APIConnectionError, openai.InternalServerError):
            while True:
                sample = self.post("samples", {"wait_s": 5})["sample"]
                if sample is not None:
                    self.samples.append(sample)
                    self._make(self, sample)

    def post(self, name: str, body: dict[str, Any]) -> Any:
        return self.client.post(f"/tranship/{name}", body=body, cast_to=object)

    def turn(self, sample: dict[str, Any], messages: list[Any], **settings: Any) -> Any:
        body = {"sample": sample["id"], "return_token_ids": True}
        answer = self.client.chat.completions.create(
            model=self.model, messages=messages, max_tokens=8, extra_body=body, **settings
        )
        self.turns.append(answer)
        return answer

    def _where(self) -> dict[str, str] | None:
        """The endpoint of the run; None once `ended` is set."""
        deadline = time.monotonic() + FOUND_S
        while not self.ended.wait(0.01):
            for file in self._run_dir.glob("serve/*.json"):
                with contextlib.suppress(FileNotFoundError):
                    return json.loads(file.read_text())
            if time.monotonic() > deadline:
                raise TimeoutError(f"no endpoint in {self._run_dir} after {FOUND_S} s")
        return None


def two_turns(agent: Agent, sample: dict[str, Any]) -> None:
    """A conversation of two turns, the second one streamed, and a reward by the text of the last."""
    messages = list(sample["messages"])
    messages.append(agent.turn(sample, messages).choices[0].message)
    messages.append({"role": "user", "content": "Are you sure?"})
    text = "".join(
        chunk.choices[0].delta.content or "" for chunk in agent.turn(sample, messages, stream=True) if chunk.choices
    )
    agent.post("reward", {"sample": sample["id"], "reward": sum(map(ord, text)) % 7})


def go(values: dict[str, Any], *agents: Agent) -> Any:
    for agent in agents:
        agent.start()
    result = tranship.run(loads(values))
    for agent in agents:
        agent.join(60)
        assert agent.failure is None
    return result


def check_ledger(ledger: dict[str, Any], admitted: int) -> None:
    assert (ledger["admitted"], ledger["in_flight"]) == (admitted, 0)
    assert ledger["trained"] + sum(ledger["dropped"].values()) == admitted


def test_what_agents_make_is_trained(recipe: Recipe, tmp_path: Path) -> None:
    agent = Agent(tmp_path / "run", two_turns)
    result = go(agent_recipe(recipe, validation__after_training=True, validation__greedy=False), agent)
    assert result.status == "completed"
    check_ledger(result.summary["ledger"], 6)
    rows = read_jsonl(result.run_dir / "samples.jsonl")
    assert len(rows) == 3 * 8
    keys = [sample["id"] for sample in agent.samples]
    assert len(keys) == len(set(keys)) == 3 * 8 + 4
    for row in rows:
        assert row["rollout_info"]["turns"] == 2
        assert row["status"] == "scored"
        assert row["score"] == row["rollout_info"]["env_reward"]
        assert "Are you sure?" in row["output"]
    whole = [answer for answer in agent.turns if hasattr(answer, "choices")]
    assert {answer.policy_version for answer in whole} >= {0, 1, 2}
    steps = [row for row in read_jsonl(result.run_dir / "metrics.jsonl") if row["kind"] == "step"]
    assert sum(step["actor/num_tokens"] for step in steps) > 0
    for step in steps:
        assert step["actor/num_tokens"] <= 8 * 2 * 8, "the model's own tokens alone are trained"
        assert step["mismatch/logprob_gap_max"] < 1e-4, "what was sampled is what is trained"
    with pytest.raises(UserError, match="its samples are made by agents"):
        prepare(str(result.run_dir), None)


def test_a_turn_that_is_asked_for_again_and_requests_that_do_not_belong(recipe: Recipe, tmp_path: Path) -> None:
    refusals: list[openai.APIStatusError] = []
    repeated: list[tuple[list[int], list[int]]] = []

    def careless(agent: Agent, sample: dict[str, Any]) -> None:
        def refused(messages: list[Any], **settings: Any) -> None:
            with pytest.raises(openai.APIStatusError) as error:
                agent.turn(sample, messages, **settings)
            refusals.append(error.value)

        messages = list(sample["messages"])
        refused([{"role": "user", "content": "Something else."}])
        refused(messages, temperature=0.5)
        refused(messages, n=2)
        first, again = (agent.turn(sample, messages).choices[0] for _ in range(2))
        repeated.append((first.token_ids, again.token_ids))
        messages.append({"role": "assistant", "content": f"{first.message.content}!"})
        refused([*messages, {"role": "user", "content": "Go on."}])
        agent.client.chat.completions.create(model=agent.model, messages=sample["messages"], max_tokens=2)
        report = {"sample": sample["id"], "reward": float(len(agent.samples) % 3)}
        assert agent.post("reward", report) == agent.post("reward", report)
        refused(sample["messages"])

    agent = Agent(tmp_path / "run", careless)
    result = go(agent_recipe(recipe, train__steps=1), agent)
    check_ledger(result.summary["ledger"], 2)
    assert len(repeated) == 8
    assert all(one == other for one, other in repeated)
    assert {row["rollout_info"]["turns"] for row in read_jsonl(result.run_dir / "samples.jsonl")} == {1}
    codes = [(refusal.status_code, refusal.code) for refusal in refusals[:5]]
    unsupported, strange = (400, "unsupported_parameter"), (400, "sample_refused")
    assert codes == [strange, unsupported, unsupported, strange, (404, "sample_not_found")]
    assert "message 0 is another one" in str(refusals[0])


def test_an_agent_that_goes_away_costs_its_sample_alone(recipe: Recipe, tmp_path: Path) -> None:
    left: list[str] = []
    lock = threading.Lock()

    def unreliable(agent: Agent, sample: dict[str, Any]) -> None:
        with lock:
            goes = len(left) < 2
            if goes:
                left.append(sample["id"])
        if not goes:
            two_turns(agent, sample)
        elif len(left) == 2:
            stream = agent.turn(sample, sample["messages"], stream=True)
            next(iter(stream))
            stream.close()

    agents = [Agent(tmp_path / "run", unreliable) for _ in range(2)]
    serve = {"enabled": True, "agents": True, "agent_timeout_s": 8}
    result = go(agent_recipe(recipe, serve=serve, train__steps=2), *agents)
    assert result.status == "completed"
    check_ledger(result.summary["ledger"], 4)
    rows = read_jsonl(result.run_dir / "samples.jsonl")
    invalid = [row for row in rows if row["status"] == "invalid"]
    assert [row["reason"] for row in invalid] == ["no reward came within 8 s"] * 2
    assert len(rows) == 2 * 8
    assert all(row["status"] == "scored" for row in rows if row not in invalid)


@pytest.mark.slow
def test_agents_of_a_sampler_of_its_own_and_a_run_that_goes_on(recipe: Recipe, tmp_path: Path) -> None:
    values = agent_recipe(recipe, placement__runtime="ray", placement__layout="split", dock__staleness=1)
    first = Agent(tmp_path / "run", two_turns)
    assert go(values, first).status == "completed"
    values["train"]["steps"] = 5
    values["run"]["resume"] = "auto"
    second = Agent(tmp_path / "run", two_turns)
    result = go(values, second)
    check_ledger(result.summary["ledger"], 10)
    rows = read_jsonl(result.run_dir / "samples.jsonl")
    assert len({(row["group_id"], row["sample_index"]) for row in rows}) == len(rows) == 5 * 8
    steps = [row for row in read_jsonl(result.run_dir / "metrics.jsonl") if row["kind"] == "step"]
    assert len(steps) == 5
    assert max(step["staleness/max"] for step in steps) <= 1


@pytest.mark.slow
def test_a_killed_sampler_costs_an_agent_a_new_claim_and_the_run_no_sample(recipe: Recipe, tmp_path: Path) -> None:
    reached, killed = threading.Event(), threading.Event()

    def held_once(agent: Agent, sample: dict[str, Any]) -> None:
        if len(agent.samples) == 10:
            agent.turn(sample, sample["messages"])
            reached.set()
            killed.wait(60)
        two_turns(agent, sample)

    placed = {"runtime": "ray", "layout": "split", "threads_per_process": 1}
    seen = {"console": "plain", "trackers": []}
    values = agent_recipe(recipe, placement=placed, dock__staleness=1, observe=seen)
    agent = Agent(tmp_path / "run", held_once, comes_back=True)
    with WatchedRun(values, tmp_path) as run:
        agent.start()
        wait_until(reached.is_set, "the tenth sample", 240)
        run.signal("sampler-0", signal.SIGKILL)
        killed.set()
        assert run.wait_for("worker_replaced")["name"] == "sampler-0.1"
        assert [file.name for file in run.dir.glob("serve/*")] in ([], ["sampler-0.1.json"])
        assert run.end() == 0
    agent.ended.set()
    agent.join(60)
    assert agent.failure is None
    assert check_whole(run.dir, 3)["admitted"] == 6
    claims = [sample["id"].rsplit("-", 1) for sample in agent.samples]
    held, token = claims[9]
    assert [other for name, other in claims[10:] if name == held] not in ([], [token])
    assert all(row["rollout_info"]["turns"] == 2 for row in read_jsonl(run.dir / "samples.jsonl"))
    assert not list(run.dir.glob("serve/*"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run__deterministic": True}, "serve.agents cannot go with run.deterministic"),
        ({"env__name": "calculator"}, "serve.agents cannot go with env.name 'calculator'"),
        ({"serve": {"agents": True}}, "serve.agents means nothing where serve.enabled is false"),
        ({"serve": {"enabled": True, "agent_timeout_s": 3}}, "serve.agent_timeout_s would have no effect"),
    ],
)
def test_what_agents_cannot_do_is_said_before_the_start(recipe: Recipe, changes: dict[str, Any], message: str) -> None:
    values = {"reward": {"function": "boxed"}, **changes}
    with pytest.raises(UserError, match=message):
        preflight(loads(agent_recipe(recipe, **values)))
