"""Samples of several turns: the model's turns come from the engine, what the world answers is appended to them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tranship.data.turns import TurnEncoder
from tranship.envs import Answer, EnvPool
from tranship.rollout import GroupRequest
from tranship.stages.growing import GrowingSample
from tranship.types import FinishReason, Response, SampleId, Sampling, UserError, sample_seed

_COUNTS = ("tool_calls", "tool_errors")


@dataclass(frozen=True)
class Limits:
    """Of one sample: turns of the model, tokens of one turn (None: what is left of the cap), tokens of an answer."""

    max_turns: int
    max_turn_tokens: int | None
    max_observation_tokens: int


@dataclass(frozen=True)
class Outcome:
    """A sample that has ended. mask: bool [T], True where the model wrote the token. info: the column rollout_info."""

    response: Response
    mask: np.ndarray
    info: dict[str, Any]


def single_turn(response: Response) -> Outcome:
    """The outcome of a sample without a world: the model wrote it all."""
    return Outcome(response, np.ones(len(response.token_ids), bool), {})


def turn_seed(run_seed: int, sample: SampleId, turn: int) -> int:
    """The seed of one turn's random numbers: `sample_seed` for the first, and 63 other bits for each further one."""
    first = sample_seed(run_seed, sample)
    if turn == 0:
        return first
    text = f"{first}/turn {turn}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@dataclass
class _Episode:
    grown: GrowingSample
    sampling: Sampling
    history: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    session: int
    waiting: bool = True
    turns: int = 0
    last_turn: int = 0
    last_reason: FinishReason = "stop"
    last_ended: bool = False
    reward: float = 0.0
    seconds: float = 0.0
    truncated: int = 0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTS, 0))
    env: dict[str, Any] = field(default_factory=dict)

    @property
    def sample(self) -> SampleId:
        return self.grown.sample

    def add_turn(self, response: Response, ended: bool) -> None:
        """Append what the model wrote. ended: its last token ends the turn for the chat template."""
        self.turns += 1
        self.last_turn, self.last_reason, self.last_ended = self.grown.num_tokens, response.finish_reason, ended
        self.waiting = True
        self.grown.add_turn(response)

    def note(self, answer: Answer) -> None:
        """Add up an answer's reward, seconds and info."""
        self.seconds += answer.seconds
        self.reward += answer.reward or 0.0
        for name, value in answer.info.items():
            if name in self.counts and isinstance(value, int):
                self.counts[name] += value
            elif name not in self.counts:
                self.env[name] = value

    def outcome(self, finish_reason: FinishReason, invalid: str | None = None) -> Outcome:
        """The sample as it stands."""
        info = {
            "turns": self.turns,
            "env_reward": self.reward,
            **self.counts,
            "truncated_observations": self.truncated,
            "last_turn": self.last_turn,
            "seconds": self.seconds,
            "env": self.env,
            **({} if invalid is None else {"invalid": invalid}),
        }
        return Outcome(self.grown.response(finish_reason), self.grown.mask(), info)


class Episodes:
    """The sessions of a rollout stage's samples.

    Tokens that the model did not write have mask False, log-prob 0.0, and the policy version in use when they were
    appended. All tokens of a sample count towards max_response_tokens. finish_reason is "stop" where the environment
    ended the sample after a turn that ended by itself, else "length": a turn was cut by a cap, or no further turn was
    allowed. A sample whose session failed ends at once, with the reason as `invalid` in its info.

    Each turn is a request of its own, whose prompt is all that came before it, and whose seed is `turn_seed`: nothing
    is sampled twice, no random number is used twice, and a turn does not depend on what else runs. The answer to the
    last turn that is allowed is waited for too (its reward counts), and its messages are dropped.
    """

    def __init__(self, pool: EnvPool, turns: TurnEncoder, *, limits: Limits, run_seed: int) -> None:
        self._pool = pool
        self._turns = turns
        self._limits = limits
        self._run_seed = run_seed
        self._running: dict[SampleId, _Episode] = {}
        self._by_session: dict[int, _Episode] = {}
        self._opening: dict[int, set[SampleId]] = {}

    @property
    def num_waiting(self) -> int:
        """Samples whose environment is at work."""
        return sum(episode.waiting for episode in self._running.values())

    def start(self, samples: Sequence[SampleId], prompt: np.ndarray, info: dict[str, Any], sampling: Sampling) -> None:
        """Begin the samples of one group. info: the column prompt_info."""
        for sample in samples:
            assert sample not in self._running, sample
            session = self._pool.open(info, turn_seed(self._run_seed, sample, -1))
            episode = _Episode(
                GrowingSample(sample, prompt), sampling, list(info["messages"]), list(info["tools"]), session
            )
            self._running[sample] = self._by_session[session] = episode
        self._opening[samples[0].group_id] = set(samples)

    def turn_ended(self, response: Response) -> None:
        """Give the environment a turn that the engine has finished."""
        episode = self._running[response.sample]
        episode.add_turn(response, self._turns.ended(response.token_ids))
        episode.history.append({"role": "assistant", "content": self._turns.text(response.token_ids)})
        self._pool.step(episode.session, {**episode.history[-1], "finish_reason": response.finish_reason})

    def advance(self, policy_version: int) -> tuple[list[GroupRequest], list[Outcome]]:
        """The turns to sample next, and the samples that have ended, by what environments have answered meanwhile.

        policy_version: that of the weights in use.
        """
        requests: list[GroupRequest] = []
        outcomes: list[Outcome] = []
        for session, answer in self._pool.poll():
            episode = self._by_session.get(session)
            if episode is None:
                continue  # It was stopped.
            outcome = self._take(episode, answer, policy_version)
            if outcome is not None:
                self._forget(episode)
                outcomes.append(outcome)
            elif episode.turns:
                requests.append(self._request([episode]))
            if episode.turns == 0:
                requests += self._first_turns(episode.sample)
        return requests, outcomes

    def stop(self, samples: Sequence[SampleId]) -> None:
        """End the sessions of those of the samples that run. The engine has to be told of them too."""
        for sample in samples:
            self._opening.pop(sample.group_id, None)
            if sample in self._running:
                self._forget(self._running[sample])

    def close(self) -> None:
        """End all sessions, and the pool."""
        self._running.clear()
        self._by_session.clear()
        self._opening.clear()
        self._pool.close()

    def _first_turns(self, sample: SampleId) -> list[GroupRequest]:
        """Requests of a group whose last session has begun: one for all samples that share the bare prompt."""
        opening = self._opening[sample.group_id]
        opening.discard(sample)
        if opening:
            return []
        del self._opening[sample.group_id]
        begun = [episode for episode in self._running.values() if episode.sample.group_id == sample.group_id]
        bare = [episode for episode in begun if not episode.grown.num_tokens]
        others = [self._request([episode]) for episode in begun if episode.grown.num_tokens]
        return ([self._request(bare)] if bare else []) + others

    def _request(self, episodes: Sequence[_Episode]) -> GroupRequest:
        """The next turn of samples that have the same tokens so far."""
        first = episodes[0]
        left = first.sampling.max_response_tokens - first.grown.num_tokens
        cap = min(left, self._limits.max_turn_tokens or left)
        for episode in episodes:
            episode.waiting = False
        samples = tuple(episode.sample for episode in episodes)
        seeds = tuple(turn_seed(self._run_seed, episode.sample, episode.turns) for episode in episodes)
        sampling = replace(first.sampling, max_response_tokens=cap)
        goes_on = first.turns + 1 < self._limits.max_turns
        return GroupRequest(first.grown.tokens(), samples, seeds, sampling, goes_on=goes_on)

    def _take(self, episode: _Episode, answer: Answer, policy_version: int) -> Outcome | None:
        """Note an answer; returns the outcome where no turn follows."""
        episode.note(answer)
        if answer.error is not None:
            return episode.outcome(episode.last_reason, answer.error)
        if answer.done:
            return episode.outcome(episode.last_reason)
        if episode.turns >= self._limits.max_turns:
            return episode.outcome("length")
        if episode.turns == 0 and not answer.messages:
            return None
        if not answer.messages:
            return episode.outcome(episode.last_reason, "the environment neither answered nor ended the sample")
        try:
            return self._observe(episode, answer, policy_version)
        except UserError as error:
            return episode.outcome(episode.last_reason, str(error))

    def _observe(self, episode: _Episode, answer: Answer, policy_version: int) -> Outcome | None:
        """Append an answer's messages; returns the outcome where they leave no room for a turn."""
        if episode.turns == 0:
            episode.history.append({"role": "assistant", "content": ""})
        messages, was_cut = self._turns.cut(answer.messages, self._limits.max_observation_tokens)
        episode.truncated += was_cut
        *before, _ = episode.history
        ids = self._turns.suffix(before, messages, ended=episode.last_ended, tools=episode.tools)
        if episode.grown.num_tokens + len(ids) >= episode.sampling.max_response_tokens:
            return episode.outcome("length", None if episode.turns else "no room for a turn after the first messages")
        episode.history += messages
        episode.grown.add_others(ids, policy_version)
        return None

    def _forget(self, episode: _Episode) -> None:
        del self._running[episode.sample]
        del self._by_session[episode.session]
        self._pool.end(episode.session)
