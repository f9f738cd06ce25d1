"""Samples that agents make: the tokens of their turns, what does not continue them, their ends."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from tranship.data.turns import TurnEncoder
from tranship.models.tiny import make_tokenizer
from tranship.stages.agents import Agents, AgentTurn
from tranship.stages.episodes import turn_seed
from tranship.types import NotYet, Response, SampleId, Sampling, UserError

TOKENIZER = make_tokenizer(600)
IM_END = 2
MESSAGES = [{"role": "user", "content": "Begin."}]
PROMPT = np.array(TOKENIZER.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False), np.int32)
INFO = {
    "messages": MESSAGES,
    "tools": [],
    "ground_truth": 5,
    "data_source": "here",
    "extra_info": {},
}
GO_ON = {"role": "user", "content": "Go on."}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def agents(clock: Clock) -> Agents:
    made = Agents(TurnEncoder(TOKENIZER, [IM_END]), roles=("user",), limit_s=10, run_seed=7, clock=clock)
    made.start([SampleId(4, 0), SampleId(4, 1)], PROMPT, INFO, Sampling(100, temperature=0.7))
    return made


def claim(agents: Agents) -> str:
    found = agents.claim()
    assert found is not None
    return found["id"]


def begin(agents: Agents, key: str, messages: list[dict[str, Any]], cap: int | None = None) -> AgentTurn:
    turn = agents.begin(key, messages, cap)
    assert turn is not None
    return turn


def answer(agents: Agents, turn: AgentTurn, ids: list[int], text: str, version: int = 3) -> dict[str, Any]:
    count = len(ids)
    tokens, logprobs = np.array(ids, np.int32), np.full(count, -1.5, np.float32)
    response = Response(SampleId(-1, -1), tokens, logprobs, np.full(count, version, np.int32), "stop")
    said = {"role": "assistant", "content": text}
    assert agents.finish(turn, response, said)
    return said


def test_turns_follow_each_other_token_by_token(agents: Agents) -> None:
    key = claim(agents)
    first = begin(agents, key, MESSAGES)
    assert np.array_equal(first.prompt_ids, PROMPT)
    assert (first.sampling.max_response_tokens, first.sampling.temperature) == (100, 0.7)
    said = answer(agents, first, [50, 51, IM_END], "one")
    second = begin(agents, key, [*MESSAGES, said, GO_ON], 5)
    suffix = TurnEncoder(TOKENIZER, [IM_END]).suffix(MESSAGES, [GO_ON], ended=True)
    assert np.array_equal(second.prompt_ids, [*PROMPT, 50, 51, IM_END, *suffix])
    assert second.sampling.max_response_tokens == 5
    assert [first.seed, second.seed] == [turn_seed(7, SampleId(4, 0), number) for number in range(2)]
    answer(agents, second, [60, IM_END], "two", version=4)
    assert agents.end(key, 0.5, None)
    _, (outcome,) = agents.advance(4)
    assert outcome.response.sample == SampleId(4, 0)
    assert outcome.response.token_ids.tolist() == [50, 51, IM_END, *suffix, 60, IM_END]
    assert outcome.mask.tolist() == [True] * 3 + [False] * len(suffix) + [True] * 2
    assert outcome.response.policy_versions.tolist() == [3] * 3 + [4] * (len(suffix) + 2)
    assert outcome.response.logprobs[outcome.mask].tolist() == [-1.5] * 5
    assert not outcome.response.logprobs[~outcome.mask].any()
    assert (outcome.info["turns"], outcome.info["env_reward"]) == (2, 0.5)
    assert outcome.info["last_turn"] == 3 + len(suffix)
    assert agents.num_waiting == 1


def test_a_lost_answer_is_asked_for_again_and_replaced(agents: Agents) -> None:
    key = claim(agents)
    said = answer(agents, begin(agents, key, MESSAGES), [50, IM_END], "one")
    for ids, text in (([60, 61, IM_END], "two"), ([70, IM_END], "three")):
        turn = begin(agents, key, [*MESSAGES, said, GO_ON])
        last = answer(agents, turn, ids, text)
    agents.drop(begin(agents, key, [*MESSAGES, said, GO_ON]))
    third = begin(agents, key, [*MESSAGES, said, GO_ON, last, GO_ON])
    ids = third.prompt_ids.tolist()
    assert 70 in ids
    assert 60 not in ids
    agents.drop(third)
    with pytest.raises(UserError, match="message 3 is another one"):
        agents.begin(key, [*MESSAGES, said, GO_ON, {"role": "assistant", "content": "two"}, GO_ON], None)
    with pytest.raises(UserError, match="message 1 is another one"):
        agents.begin(key, [*MESSAGES, {**said, "content": "On"}, GO_ON], None)
    with pytest.raises(UserError, match="it has 1 messages"):
        agents.begin(key, MESSAGES, None)


def test_calls_of_tools_are_compared_by_what_they_say(agents: Agents) -> None:
    key = claim(agents)
    turn = begin(agents, key, MESSAGES)
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1, "y": [2]}'}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    response = Response(SampleId(-1, -1), np.array([50, IM_END], np.int32), *np.zeros((2, 2), np.float32), "stop")
    assert agents.finish(turn, response, said)
    other = {**call, "id": "b", "function": {"name": "f", "arguments": '{"y":[2],"x":1}'}}
    agents.drop(begin(agents, key, [*MESSAGES, {**said, "tool_calls": [other], "refusal": None}, GO_ON]))
    wrong = {**call, "function": {"name": "f", "arguments": "{}"}}
    with pytest.raises(UserError, match="does not continue"):
        agents.begin(key, [*MESSAGES, {**said, "tool_calls": [wrong]}, GO_ON], None)
    with pytest.raises(UserError, match="role 'tool' cannot follow"):
        agents.begin(key, [*MESSAGES, said, {"role": "tool", "content": "4", "tool_call_id": "a"}], None)


def test_what_has_no_room_no_turn_or_a_turn_under_way(agents: Agents) -> None:
    key = claim(agents)
    with pytest.raises(UserError, match="no turn that could have earned a reward"):
        agents.end(key, 1.0, None)
    turn = begin(agents, key, MESSAGES)
    for ask in (lambda: agents.begin(key, MESSAGES, None), lambda: agents.end(key, 1.0, None)):
        with pytest.raises(NotYet, match="is being written"):
            ask()
    said = answer(agents, turn, [*range(50, 148), IM_END], "long")
    with pytest.raises(UserError, match="max_response_tokens 100 no turn follows"):
        agents.begin(key, [*MESSAGES, said, GO_ON], None)
    assert agents.end(key, 1.0, None)


def test_samples_that_nobody_claims_or_ends_are_invalid(agents: Agents, clock: Clock) -> None:
    clock.now = 6.0
    key = claim(agents)
    turn = begin(agents, key, MESSAGES)
    clock.now = 11.0
    _, (unclaimed,) = agents.advance(0)
    assert unclaimed.info["invalid"] == "no agent claimed it within 10 s"
    assert len(unclaimed.response.token_ids) == 0
    clock.now = 17.0
    _, (late,) = agents.advance(0)
    assert (late.info["invalid"], late.response.sample) == ("no reward came within 10 s", SampleId(4, 0))
    said = {"role": "assistant", "content": "x"}
    empty = np.empty(0)
    assert not agents.finish(turn, Response(SampleId(-1, -1), empty, empty, empty, "stop"), said)
    assert not agents.end(key, 1.0, None)
    assert agents.claim() is None


def test_a_group_that_is_taken_away_is_unknown_and_offered_anew_under_other_names(agents: Agents) -> None:
    key = claim(agents)
    agents.stop([SampleId(4, 0), SampleId(4, 1)])
    assert agents.num_waiting == 0
    assert agents.begin(key, MESSAGES, None) is None
    assert not agents.end(key, 1.0, None)
    agents.start([SampleId(4, 0)], PROMPT, INFO, Sampling(40))
    assert claim(agents) != key
    assert agents.advance(0) == ([], [])


def test_a_claim_has_null_where_a_number_of_the_prompt_is_none(agents: Agents) -> None:
    agents.stop([SampleId(4, 0), SampleId(4, 1)])
    info = INFO | {"ground_truth": math.nan, "extra_info": {"costs": [1.5, math.inf]}}
    agents.start([SampleId(5, 0)], PROMPT, info, Sampling(40))
    found = agents.claim()
    assert found is not None
    assert json.loads(json.dumps(found, allow_nan=False))["extra_info"] == {"costs": [1.5, None]}
    assert found["ground_truth"] is None


def test_a_reward_for_a_group_that_is_taken_away_is_not_that_of_its_next_beginning(agents: Agents) -> None:
    assert agents.end(claim(agents), None, "broken")
    agents.stop([SampleId(4, 0), SampleId(4, 1)])
    agents.start([SampleId(4, 0), SampleId(4, 1)], PROMPT, INFO, Sampling(40))
    assert agents.advance(0) == ([], [])


def test_a_sample_whose_turn_is_with_the_engine_takes_no_second_place(agents: Agents) -> None:
    turn = begin(agents, claim(agents), MESSAGES)
    assert agents.num_waiting == 1
    agents.drop(turn)
    assert agents.num_waiting == 2


def test_a_report_that_is_repeated_counts_once(agents: Agents) -> None:
    key = claim(agents)
    assert [agents.end(key, None, "broken") for _ in range(2)] == [True, True]
    assert not agents.end(key, None, "another reason")
    _, (outcome,) = agents.advance(0)
    assert outcome.info["invalid"] == "broken"
