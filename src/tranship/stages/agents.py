"""Samples that agents outside of the run make: they ask for the model's turns at the endpoint, and report a reward.

An agent claims a sample, which is a prompt of the run, asks for turns that continue its conversation, and ends it with
a reward. What the model writes stays as it was sampled; what the agent writes between is appended as the chat template
would write it. The rollout stage sees a world like any other.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tranship.data.messages import to_messages
from tranship.data.turns import TurnEncoder
from tranship.observe.jsonl import finite
from tranship.rollout import GroupRequest
from tranship.stages.episodes import Outcome, turn_seed
from tranship.stages.growing import GrowingSample
from tranship.types import NotYet, Response, SampleId, Sampling, UserError

_MOST_ENDED = 4096

Message = dict[str, Any]


@dataclass(frozen=True)
class AgentTurn:
    """A turn that was asked for: prompt_ids int32 [P] is the sample so far and what the agent adds to it.

    number: of the turn in its sample, from 0 on. new: the agent's messages that come before it; suffix: their tokens.
    tools: that the model was told of.
    """

    key: str
    number: int
    prompt_ids: np.ndarray
    new: tuple[Message, ...]
    suffix: np.ndarray
    tools: list[dict[str, Any]]
    seed: int
    sampling: Sampling


@dataclass
class _Made:
    """A turn that was answered. said: the message of the answer. parts: of the sample before it. ended: its last token
    ends it."""

    new: tuple[Message, ...]
    said: Message
    parts: int
    ended: bool
    response: Response


@dataclass
class _Task:
    grown: GrowingSample
    info: Mapping[str, Any]
    sampling: Sampling
    since: float
    claimed: bool = False
    turns: list[_Made] = field(default_factory=list)
    asked: AgentTurn | None = None

    def conversation(self, num_turns: int) -> list[Message]:
        """The messages of the prompt and of the first turns."""
        made = [message for turn in self.turns[:num_turns] for message in (*turn.new, turn.said)]
        return [*self.info["messages"], *made]

    def outcome(self, reward: float | None, invalid: str | None, seconds: float) -> Outcome:
        """The sample as it stands."""
        last = self.turns[-1].response if self.turns else None
        info = {
            "turns": len(self.turns),
            "last_turn": self.grown.num_tokens - (0 if last is None else len(last.token_ids)),
            "seconds": seconds,
            **({} if reward is None else {"env_reward": reward}),
            **({} if invalid is None else {"invalid": invalid}),
        }
        return Outcome(self.grown.response("stop" if last is None else last.finish_reason), self.grown.mask(), info)


class Agents:
    """The samples of a rollout stage that wait for agents, or are with them. For two threads: the stage's, and the
    endpoint's.

    roles: of the messages that an agent may add. limit_s: a sample is invalid if no agent claims it for so long, or if
    its reward has not come so long after it was claimed. wakeup: called when a sample has ended.

    A turn's seed is `turn_seed`, as an environment's is. An agent that asks for its last turn again (its answer was
    lost) gets it anew, in the place of the first one.
    """

    def __init__(
        self,
        turns: TurnEncoder,
        *,
        roles: Sequence[str],
        limit_s: float,
        run_seed: int,
        wakeup: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._turns = turns
        self._roles = tuple(roles)
        self._limit_s = limit_s
        self._run_seed = run_seed
        self._wakeup = wakeup
        self._clock = clock
        self._lock = threading.Lock()
        self._tasks: dict[str, _Task] = {}
        self._outcomes: list[Outcome] = []
        self._ended: OrderedDict[str, tuple[float | None, str | None]] = OrderedDict()

    # The stage's thread

    @property
    def num_waiting(self) -> int:
        """Samples that are not ended, and of which no turn is with the engine."""
        with self._lock:
            return sum(task.asked is None for task in self._tasks.values())

    def start(self, samples: Sequence[SampleId], prompt: np.ndarray, info: dict[str, Any], sampling: Sampling) -> None:
        """Offer the samples of one group. info: the column prompt_info."""
        with self._lock:
            for sample in samples:
                key = "-".join([*map(str, sample), secrets.token_hex(4)])
                self._tasks[key] = _Task(GrowingSample(sample, prompt), info, sampling, self._clock())

    def turn_ended(self, response: Response) -> None:
        """Never: turns come through the endpoint, and none through the stage."""
        raise AssertionError(f"the stage asked for {response.sample}")

    def advance(self, policy_version: int) -> tuple[list[GroupRequest], list[Outcome]]:
        """(nothing to sample, the samples that have ended)."""
        with self._lock:
            for key, task in list(self._tasks.items()):
                if self._clock() - task.since > self._limit_s:
                    what = "no reward came" if task.claimed else "no agent claimed it"
                    self._end(key, None, f"{what} within {self._limit_s:g} s")
            outcomes, self._outcomes = self._outcomes, []
        return [], outcomes

    def stop(self, samples: Sequence[SampleId]) -> None:
        """Forget these samples; the agents of those that are not ended are told so when they ask again."""
        wanted = set(samples)
        with self._lock:
            self._tasks = {key: task for key, task in self._tasks.items() if task.grown.sample not in wanted}
            self._outcomes = [outcome for outcome in self._outcomes if outcome.response.sample not in wanted]

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._tasks.clear()

    # The endpoint's thread

    def claim(self) -> dict[str, Any] | None:
        """A sample that waits: its id, and what is known of its prompt, in JSON's values; None if there is none."""
        with self._lock:
            key = next((key for key, task in self._tasks.items() if not task.claimed), None)
            if key is None:
                return None
            task = self._tasks[key]
            task.claimed, task.since = True, self._clock()
        names = ("messages", "tools", "ground_truth", "data_source", "extra_info")
        known = finite({name: task.info[name] for name in names})
        return {"id": key, "group_id": task.grown.sample.group_id, **known}

    def begin(self, key: str, messages: Sequence[Message], cap: int | None) -> AgentTurn | None:
        """The next turn of a sample, for a conversation that continues it; None if the sample is not with an agent.

        cap: most tokens of the turn; None: what is left. Raises UserError for another conversation, where no room is
        left; NotYet while another turn of it is being written.
        """
        with self._lock:
            task = self._claimed(key)
            if task is None:
                return None
            number, new = self._continued(task, messages)
            suffix = self._suffix(task, number, new)
            parts = task.turns[number].parts if number < len(task.turns) else len(task.grown.parts)
            before = replace(task.grown, parts=list(task.grown.parts), masks=list(task.grown.masks))
            before.keep(parts)
            left = task.sampling.max_response_tokens - before.num_tokens - len(suffix)
            if left < 1:
                raise UserError(
                    f"the sample {key} has {before.num_tokens} tokens after its prompt, and {len(suffix)} would be "
                    f"added: with rollout.max_response_tokens {task.sampling.max_response_tokens} no turn follows; "
                    "report its reward"
                )
            task.asked = AgentTurn(
                key,
                number,
                np.concatenate([before.tokens(), suffix]).astype(np.int32),
                tuple(new),
                suffix,
                task.info["tools"],
                turn_seed(self._run_seed, task.grown.sample, number),
                replace(task.sampling, max_response_tokens=min(left, cap or left)),
            )
            return task.asked

    def finish(self, turn: AgentTurn, response: Response, said: Message) -> bool:
        """The turn was answered; False if the sample has ended meanwhile. response: its tokens; said: the message as
        the agent gets it."""
        with self._lock:
            task = self._tasks.get(turn.key)
            if task is None or task.asked is not turn:
                return False
            task.asked = None
            if turn.number < len(task.turns):
                task.grown.keep(task.turns[turn.number].parts)
                del task.turns[turn.number :]
            parts = len(task.grown.parts)
            if len(turn.suffix):
                task.grown.add_others(turn.suffix, int(response.policy_versions.min()))
            task.grown.add_turn(replace(response, sample=task.grown.sample))
            (plain,) = to_messages([said], "messages", "the answer")
            task.turns.append(_Made(turn.new, plain, parts, self._turns.ended(response.token_ids), response))
        return True

    def drop(self, turn: AgentTurn) -> None:
        """The turn was not answered: the sample is as it was before."""
        with self._lock:
            task = self._tasks.get(turn.key)
            if task is not None and task.asked is turn:
                task.asked = None

    def end(self, key: str, reward: float | None, invalid: str | None) -> bool:
        """End a sample with its reward, or as invalid with the reason; False if it is not with an agent. The same once
        more does nothing."""
        with self._lock:
            if self._ended.get(key) == (reward, invalid):
                return True
            task = self._claimed(key)
            if task is None:
                return False
            if reward is not None and not task.turns:
                raise UserError(f"the sample {key} has no turn that could have earned a reward: ask for one first")
            self._end(key, reward, invalid)
        self._wakeup()
        return True

    def _end(self, key: str, reward: float | None, invalid: str | None) -> None:
        task = self._tasks.pop(key)
        self._outcomes.append(task.outcome(reward, invalid, self._clock() - task.since))
        self._ended[key] = (reward, invalid)
        if len(self._ended) > _MOST_ENDED:
            self._ended.popitem(last=False)

    def _claimed(self, key: str) -> _Task | None:
        task = self._tasks.get(key)
        if task is None or not task.claimed:
            return None
        if task.asked is not None:
            raise NotYet(f"a turn of the sample {key} is being written: ask again when it is there")
        return task

    def _continued(self, task: _Task, messages: Sequence[Message]) -> tuple[int, list[Message]]:
        """The number of the turn that these messages ask for, and those of them that are new."""
        given = to_messages(list(messages), "messages", "the request")
        if task.turns:
            known = task.conversation(len(task.turns))
            if len(given) > len(known) and _same(given[: len(known)], known):
                return len(task.turns), given[len(known) :]
        last = max(len(task.turns) - 1, 0)
        known = task.conversation(last)
        new = list(task.turns[last].new) if task.turns else []
        if _same(given, [*known, *new]):
            return last, new
        whole = task.conversation(len(task.turns))
        place = next((at for at, (a, b) in enumerate(zip(given, whole, strict=False)) if not _same([a], [b])), None)
        what = f"message {place} is another one" if place is not None else f"it has {len(given)} messages"
        raise UserError(
            f"the conversation does not continue that of the sample ({what}; its own has {len(whole)}): send all of "
            "its messages as they were given and answered, and the new ones after them"
        )

    def _suffix(self, task: _Task, number: int, new: Sequence[Message]) -> np.ndarray:
        """The tokens between the turn before and this one, int32 [S]."""
        if number == 0:
            return np.empty(0, np.int32)
        wrong = [message["role"] for message in new if message["role"] not in self._roles]
        if wrong:
            raise UserError(
                f"a message of role {wrong[0]!r} cannot follow a turn of the model here: use {' or '.join(self._roles)}"
            )
        before = [*task.conversation(number - 1), *task.turns[number - 1].new]
        return self._turns.suffix(before, new, ended=task.turns[number - 1].ended, tools=task.info["tools"])


def _same(given: Sequence[Message], known: Sequence[Message]) -> bool:
    """Whether messages say the same: role, text, and calls of tools by name and arguments."""
    return len(given) == len(known) and all(map(_equal, given, known))


def _equal(one: Message, other: Message) -> bool:
    return _said(one) == _said(other)


def _said(message: Message) -> tuple[str, str, str]:
    calls = [call.get("function", call) for call in message.get("tool_calls") or []]
    plain = [(call["name"], call["arguments"]) for call in calls]
    return message["role"], message.get("content") or "", json.dumps(plain, sort_keys=True)
