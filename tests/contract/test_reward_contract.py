"""What holds for every built-in reward function, wherever it runs."""

import inspect
import json
import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import pytest

from tranship.lookup import resolve
from tranship.rewards import REWARDS, RewardPool, RewardRequest, Term
from tranship.rewards.calls import load
from tranship.rewards.request import BY_NAME, POSITIONAL
from tranship.rewards.scoring import to_score
from tranship.types import Score

GOLDS = ["42", "-5", "1234", "18", "72"]
TEXTS = [
    "#### 42",
    "#### 42" + "." * 400,
    "#### -5",
    "#### 1,234",
    "#### $18",
    "I think 72",
    "",
    r"\boxed{42}",
    "\ud800 é 72",
    "<think>a</think><answer>18</answer>",
    "```python\nanswer = 42\n```",
]
ANSWERS = [RewardRequest("gsm8k", text, gold, {"index": 1}, num_tokens=50) for gold in GOLDS for text in TEXTS]
ENTRY = {"question": "40 + 2", "answer": "18", "metadata": {"source_dataset": "chain_sum"}}
# What a built-in needs of a row beyond an answer that is a number.
ROWS = {
    "run_code": [RewardRequest("s", text, ["assert answer == 42"]) for text in (TEXTS[-1], "no code")],
    "reasoning_gym": [RewardRequest("s", text, "18", {"entry": ENTRY}) for text in TEXTS],
    "length_penalty": [
        RewardRequest("s", "", num_tokens=tokens, max_response_tokens=100) for tokens in (0, 50, 100, 150)
    ],
    "cosine_length": [
        RewardRequest("s", text, "42", num_tokens=50, max_response_tokens=100, finish_reason=reason)
        for text in TEXTS[:3]
        for reason in ("stop", "length")
    ],
}


def rows(name: str) -> list[RewardRequest]:
    return ROWS.get(name, ANSWERS)


def direct(name: str) -> list[Score]:
    call = load(name, {})
    return [to_score(call.run(request.to_row())) for request in rows(name)]


def pooled(name: str) -> list[Score]:
    with RewardPool([Term(name, name)], 2, 20.0) as pool:
        return pool.score_all(rows(name))


@pytest.mark.parametrize("name", REWARDS)
def test_the_same_answers_in_a_thread_and_a_process(name: str):
    expected = direct(name)
    assert len({score.value for score in expected}) >= 2
    assert None not in {score.value for score in expected}
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(direct, name).result() == expected
    assert pooled(name) == expected


def test_the_same_answers_in_a_process_of_another_process():
    with multiprocessing.get_context("spawn").Pool(1) as remote:
        for name in ("exact_integer", "hash_answer", "boxed"):
            assert remote.apply(pooled, (name,)) == direct(name)


@pytest.mark.parametrize("name", REWARDS)
def test_the_signature_is_that_of_verl(name: str):
    function = resolve(name, REWARDS, "reward.function")
    call = function.__call__ if inspect.isclass(function) else function
    names = [key for key in inspect.signature(call).parameters if key != "self"]
    assert tuple(names[:4]) == POSITIONAL
    own = inspect.signature(call).parameters
    by_name = [key for key in names[4:] if own[key].kind is inspect.Parameter.KEYWORD_ONLY]
    assert set(by_name) <= set(BY_NAME)
    result = load(name, {}).run(rows(name)[0].to_row())
    json.dumps(result)
    assert to_score(result).status == "scored"


@pytest.mark.parametrize("name", ["exact_integer", "hash_answer", "boxed", "math_verify", "format_tags"])
def test_verifiers_score_0_or_1_and_say_whether_an_answer_was_there(name: str):
    for score in direct(name):
        assert score.value in (0.0, 1.0)
        assert score.extra["well_formed"] in (0.0, 1.0)
