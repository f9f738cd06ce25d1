"""Clients ask the policy of a run while it is trained: they get answers, and the run is what it would have been."""

from __future__ import annotations

import json
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from safetensors.numpy import load_file

import tranship
from tranship.config.load import loads
from tranship.serve import EngineSettings, load_served
from tranship.trainer.preflight import preflight
from tranship.trainer.trained import find_model
from tranship.types import UserError

Recipe = Callable[..., dict[str, Any]]
FOUND_S = 120


class Client(threading.Thread):
    """Asks again and again as soon as a run says where, until nobody answers. answers, refusals: what came."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(daemon=True)
        self._run_dir = run_dir
        self.answers: list[Any] = []
        self.refusals: list[openai.APIStatusError] = []
        self.modes: list[int] = []

    def run(self) -> None:
        where = self._where()
        client = openai.OpenAI(base_url=where["url"], api_key=where["token"], max_retries=0, timeout=60)
        try:
            while True:
                self.answers.append(
                    client.chat.completions.create(
                        model=where["model"],
                        messages=[{"role": "user", "content": "What is 1 + 2?"}],
                        n=3,
                        seed=len(self.answers),
                        max_tokens=6,
                        extra_body={"return_token_ids": True},
                    )
                )
        except openai.APIStatusError as error:
            self.refusals.append(error)
        except openai.APIConnectionError:
            return

    def _where(self) -> dict[str, str]:
        deadline = time.monotonic() + FOUND_S
        while time.monotonic() < deadline:
            for file in self._run_dir.glob("serve/*.json"):
                self.modes.append(stat.S_IMODE(file.stat().st_mode))
                return json.loads(file.read_text())
            time.sleep(0.01)
        raise TimeoutError(f"no endpoint in {self._run_dir} after {FOUND_S} s")


def weights(run_dir: Path) -> dict[str, bytes]:
    return {name: tensor.tobytes() for name, tensor in load_file(run_dir / "model" / "model.safetensors").items()}


def test_a_run_that_is_asked_trains_the_same_weights(recipe: Recipe, tmp_path: Path) -> None:
    settings = {"run__export": True, "train__steps": 8, "data__max_prompt_tokens": 256}
    quiet = tranship.run(loads(recipe(**settings, run__dir=str(tmp_path / "quiet"))))
    asked_dir = tmp_path / "asked"
    client = Client(asked_dir)
    client.start()
    asked = tranship.run(loads(recipe(**settings, run__dir=str(asked_dir), serve__enabled=True, serve__name="mine")))
    client.join(60)
    assert quiet.status == asked.status == "completed"
    assert weights(quiet.run_dir) == weights(asked.run_dir)
    assert asked.summary["ledger"] == quiet.summary["ledger"]
    assert client.answers
    assert client.modes == [0o600]
    assert {refusal.status_code for refusal in client.refusals} <= {503}
    versions = [answer.policy_version for answer in client.answers]
    assert versions == sorted(versions)
    assert set(versions) <= set(range(9))
    assert all(len(answer.choices) == 3 for answer in client.answers)
    assert not list(asked_dir.glob("serve/*.json"))
    found = find_model(str(asked_dir))
    loaded = load_served(found.folder, "mine", EngineSettings(threads=1), found.policy_version)
    assert loaded.engine.policy_version == 8
    assert "policy version 8" in loaded.lines()[0]


def test_what_a_killed_try_left_of_its_endpoints_is_gone(recipe: Recipe, tmp_path: Path) -> None:
    stale = tmp_path / "run" / "serve" / "sampler-7.json"
    stale.parent.mkdir(parents=True)
    stale.write_text("{}")
    assert tranship.run(loads(recipe(train__steps=1))).status == "completed"
    assert not stale.exists()


@pytest.mark.slow
def test_a_sampler_of_its_own_answers(recipe: Recipe, tmp_path: Path) -> None:
    changes = {"placement__runtime": "ray", "placement__layout": "split", "serve__enabled": True, "train__steps": 6}
    client = Client(tmp_path / "run")
    client.start()
    assert tranship.run(loads(recipe(**changes))).status == "completed"
    client.join(60)
    assert client.answers
    assert max(answer.policy_version for answer in client.answers) > 0
    assert not list(tmp_path.glob("run/serve/*.json"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"serve__port": 8000}, "serve.port means nothing where serve.enabled is false"),
        ({"serve__enabled": True, "serve__name": ""}, "serve.name"),
        (
            {
                "serve__enabled": True,
                "serve__port": 8000,
                "placement__runtime": "ray",
                "placement__layout": "split",
                "placement__num_samplers": 2,
            },
            "serve.port 8000 cannot be that of 2 samplers",
        ),
    ],
)
def test_what_cannot_be_served_is_said_before_the_start(recipe: Recipe, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        preflight(loads(recipe(**changes)))
