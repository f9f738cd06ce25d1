"""Tasks of `verifiers`: those that one answer solves are played, the others refused. Needs the package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from tranship.envs import EnvPool
from tranship.envs.verifiers_adapter import VerifiersEnv, rows
from tranship.types import UserError

FILE = Path(__file__).parent / "capitals_taskset.py"
CAPITALS = f"{FILE}:Capitals"
INSTALLED = importlib.util.find_spec("verifiers") is not None
needs_package = pytest.mark.skipif(not INSTALLED, reason="verifiers is not installed")


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(UserError, match="pip install 'verifiers"):
        VerifiersEnv("gsm8k")


@needs_package
def test_rows_are_the_tasks_prompts() -> None:
    first, second = rows(CAPITALS, {"shout": True})
    assert first["prompt"] == [
        {"role": "system", "content": "One word."},
        {"role": "user", "content": "THE CAPITAL OF FRANCE?"},
    ]
    assert (first["reward_model"]["ground_truth"], second["reward_model"]["ground_truth"]) == (0, 1)
    assert len(rows(CAPITALS, limit=1)) == 1


@needs_package
def test_an_answer_gets_the_tasks_own_rewards() -> None:
    with EnvPool("verifiers", {"taskset": CAPITALS}, memory_bytes=4 << 30) as pool:
        found = []
        for answer in ("It is Rome.", "I believe that it might well be Rome.", "Paris", "crash"):
            session = pool.open({"ground_truth": 1}, 0)
            for message in (None, {"role": "assistant", "content": answer, "finish_reason": "stop"}):
                if message is not None:
                    pool.step(session, message)
                assert pool.wait(30)
                ((_, got),) = pool.poll()
            found.append(got)
            pool.end(session)
    assert [(got.reward, got.done) for got in found[:3]] == [(2.5, True), (2.0, True), (0.5, True)]
    assert found[0].info == {"letters": 11.0}
    assert found[3].error is not None
    assert "the judge is ill" in found[3].error


@needs_package
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{FILE}:Boxes", "need rewards or metrics that look into a runtime"),
        (f"{FILE}:Preparations", "need steps of their own"),
        (f"{FILE}:Endless", "set limit"),
        (f"{FILE}:Capital", "no Taskset"),
    ],
)
def test_tasks_that_need_more_than_an_answer_are_refused(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        VerifiersEnv(name)
