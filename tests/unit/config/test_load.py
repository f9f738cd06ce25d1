from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tranship.config import load
from tranship.config.keys import KEYS, LEAVES, is_free, is_nullable
from tranship.config.load import dump, loads
from tranship.config.schema import Config
from tranship.config.yaml_text import read
from tranship.types import UserError

RECIPE: dict[str, Any] = {
    "model": {"path": "some/folder"},
    "data": {"train": {"source": "sums"}},
    "train": {"steps": 3},
}


def error_of(overrides: list[str], recipe: dict[str, Any] | None = None) -> str:
    with pytest.raises(UserError) as caught:
        loads(recipe or RECIPE, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_small_recipe_gets_the_defaults() -> None:
    config = loads(RECIPE)
    assert config.train.steps == 3
    assert config.rollout.group_size == 8
    assert config.train.optimizer.betas == (0.9, 0.999)
    assert config.groups_per_step == 8


def test_load_reads_a_file_and_puts_overrides_over_it(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("model: {path: m}\ndata: {train: {source: sums}}\ntrain: {steps: 3}\n")
    config = load(
        recipe,
        [
            "train.steps=7",
            "train.optimizer.learning_rate=1e-5",
            "rollout.stop_token_ids=[1, 2]",
            "observe.trackers=[]",
            "observe.console=off",
            "reward.args.scale.low=1",
            "data.val.source=val.jsonl",
            "run.dir=a=b",
        ],
    )
    assert config.train.steps == 7
    assert config.train.optimizer.learning_rate == 1e-5
    assert config.rollout.stop_token_ids == (1, 2)
    assert config.observe.trackers == ()
    assert config.observe.console == "off"
    assert config.reward.args == {"scale": {"low": 1}}
    assert config.data.val is not None
    assert config.data.val.source == "val.jsonl"
    assert config.run.dir == "a=b"


def test_a_section_can_be_replaced_whole() -> None:
    config = loads(RECIPE, ["train.optimizer={learning_rate: 1e-4, betas: [0.8, 0.9]}", "data.val=null"])
    assert config.train.optimizer.learning_rate == 1e-4
    assert config.train.optimizer.betas == (0.8, 0.9)


def test_overrides_do_not_change_the_mapping_that_was_given() -> None:
    before = {key: dict(value) for key, value in RECIPE.items()}
    loads(RECIPE, ["train.steps=9", "reward.args.x=1"])
    assert before == RECIPE


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.optimizer.learning_rte=1e-5", ["learning_rte", "1e-05", "did you mean train.optimizer.learning_rate"]),
        ("learning_rte=1e-5", ["did you mean train.optimizer.learning_rate"]),
        ("learning_rate=1e-5", ["did you mean train.optimizer.learning_rate"]),
        ("train.learning_rate=1e-5", ["did you mean train.optimizer.learning_rate"]),
        ("rollout.group_sise=4", ["did you mean rollout.group_size?"]),
        ("dock.capacity=4", ["did you mean dock.capacity_bytes?"]),
        ("rollout.n=8", ["verl", "rollout.group_size"]),
        ("actor_rollout_ref.rollout.n=8", ["verl", "rollout.group_size"]),
        ("num_generations=8", ["TRL", "rollout.group_size"]),
        ("rollout.num_generations=8", ["TRL", "rollout.group_size"]),
        ("num_generation=8", ["TRL", "rollout.group_size"]),
        ("n_samples_per_prompt=8", ["OpenRLHF, slime and MindSpeed RL call", "rollout.group_size"]),
        ("rl_config.n_samples_per_prompt=8", ["MindSpeed RL", "rollout.group_size"]),
        ("data.train_batch_size=64", ["verl", "train.batch_size", "counts prompts", "rollout.group_size"]),
        ("train_batch_size=64", ["verl", "train.batch_size", "OpenRLHF", "train.minibatches"]),
        ("beta=0.1", ["TRL", "algorithm.kl.coef"]),
        ("zzz=1", ["the sections are run, model, data"]),
        ("rollout.zzz=1", ["the keys of rollout are engine, group_size"]),
    ],
)
def test_an_unknown_key_names_the_key_that_was_meant(override: str, words: list[str]) -> None:
    message = error_of([override])
    assert "unknown key" in message
    assert f"override {override!r}" in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.steps=ten", ["train.steps", '"ten"', "an integer", "at least 1"]),
        ("train.steps=-3", ["-3", "at least 1"]),
        ("train.steps=1.5", ["1.5", "an integer"]),
        ("train.steps=true", ["true", "an integer"]),
        ("rollout.temperature=true", ["true", "a number"]),
        ("rollout.temperature=.inf", ["Infinity", "a number"]),
        ("rollout.temperature=.nan", ["NaN", "a number"]),
        ("rollout.top_p=2", ["rollout.top_p is 2", "above 0", "at most 1"]),
        ("rollout.min_p=1", ["below 1"]),
        ("train.optimizer.betas=[0.9]", ["[0.9]", "a list of 2 numbers"]),
        ('train.optimizer.betas=[0.9, "x"]', ['[0.9, "x"]', "a list of 2 numbers"]),
        ("rollout.stop_token_ids=2", ["a list of integers"]),
        ("train.precision=fp16", ['"fp16"', "one of fp32, bf16"]),
        ("run.export=yes", ['"yes"', "true or false"]),
        ("model=smol", ['"smol"', "a section with the keys path, trust_remote_code"]),
        ("reward.args=3", ["a mapping"]),
        ("run.dir=", ["null", "a string"]),
        ("algorithm.dual_clip=0.5", ["above 1", "or null"]),
        ("train.steps.x=3", ["train.steps is 3, not a section"]),
        ("foo", ["section.key=value"]),
        ("=3", ["section.key=value"]),
        ("a..b=3", ["section.key=value"]),
        ("reward.args.x=[", ["not valid YAML"]),
    ],
)
def test_a_wrong_value_is_told_with_its_key_and_what_is_wanted(override: str, words: list[str]) -> None:
    message = error_of([override])
    for word in [*words, repr(override)]:
        assert word in message


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.batch_size=60"], ["train.batch_size 60", "rollout.group_size 8", "batch_size=64"]),
        (["train.minibatches=3"], ["train.minibatches 3", "8 groups"]),
        (["placement.layout=split"], ["placement.runtime=ray"]),
        (["run.deterministic=true", "train.precision=bf16"], ["train.precision=fp32", "deterministic=false"]),
        (["run.deterministic=true", "rollout.engine=vllm"], ["rollout.engine=native"]),
        (["rollout.cuda_graphs=true", "rollout.engine=vllm"], ["rollout.engine is vllm", "cuda_graphs=false"]),
        (["rollout.cuda_graphs=true", "placement.device=cpu"], ["placement.device is cpu", "cuda_graphs=false"]),
        (["rollout.cuda_graphs=true", "run.deterministic=true"], ["run.deterministic is true", "cuda_graphs=false"]),
    ],
)
def test_values_that_do_not_fit_each_other_are_refused_with_the_numbers(overrides: list[str], words: list[str]) -> None:
    message = error_of(overrides)
    for word in words:
        assert word in message


def test_a_missing_key_is_named_and_a_misspelt_one_comes_first() -> None:
    assert "train.steps is missing: it wants an integer" in error_of([], {**RECIPE, "train": {}})
    message = error_of([], {**RECIPE, "train": {"stepps": 3}})
    assert "did you mean train.steps?" in message
    assert "also wrong: train.steps" in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["is empty"]),
        ("- 1\n- 2\n", ["holds [1, 2]", "sections"]),
        ("train:\n  steps: 1\n  steps: 2\n", ["line 3", "'steps' comes twice", "line 2"]),
        ("train:\n\tsteps: 1\n", ["line 2", "not valid YAML"]),
        ("a: [1, 2\nb: 3\n", ["not valid YAML"]),
        ("1: 2\n", ["line 1", "1 is not a string"]),
        ("a: 1\n---\nb: 2\n", ["not valid YAML"]),
        ("a: !!python/object:os.system {}\n", ["not valid YAML"]),
    ],
)
def test_a_broken_file_is_told_with_its_line(tmp_path: Path, text: str, words: list[str]) -> None:
    recipe = tmp_path / "broken.yaml"
    recipe.write_text(text)
    with pytest.raises(UserError) as caught:
        load(recipe)
    message = str(caught.value)
    assert "\n" not in message
    for word in [*words, "broken.yaml"]:
        assert word in message


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no recipe .*nowhere\.yaml"):
        load(tmp_path / "nowhere.yaml")
    with pytest.raises(UserError, match="cannot be read"):
        load(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(UserError, match="not UTF-8"):
        load(tmp_path / "binary.yaml")


TRICKY = st.one_of(
    st.sampled_from(
        ["off", "yes", "1e-5", "1e5", "0x10", "010", "12:30", "null", "~", "", " a ", "a: b", "#c", "é\n", "."]
    ),
    st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=20),
)
JSON = st.recursive(
    st.one_of(TRICKY, st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TRICKY, inner, max_size=3)),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(
    text=TRICKY,
    args=st.dictionaries(TRICKY, JSON, max_size=3),
    rate=st.floats(min_value=1e-30, max_value=1e6),
    stops=st.lists(st.integers(min_value=0), max_size=4),
)
def test_dump_gives_back_the_same_configuration(text: str, args: dict, rate: float, stops: list[int]) -> None:
    config = loads(
        {
            "model": {"path": text},
            "data": {"train": {"source": text, "args": args}},
            "train": {"steps": 1, "optimizer": {"learning_rate": rate}},
            "rollout": {"stop_token_ids": stops},
            "reward": {"args": args},
            "run": {"dir": text},
        }
    )
    assert loads(read(dump(config), "dump")) == config


def loaded_or_told(recipe: Any, overrides: list[str]) -> str:
    """The message of the error, or nothing; any error but a UserError of one line fails the test."""
    try:
        loads(recipe, overrides)
        message = ""
    except UserError as error:
        message = str(error)
    assert "\n" not in message
    return message


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30), st.sampled_from([*KEYS, "rollout.n", "a.b", ""]))
def test_no_override_whatever_its_text_ends_in_anything_but_one_line(text: str, key: str) -> None:
    loaded_or_told(RECIPE, [text])
    loaded_or_told(RECIPE, [f"{key}={text}"])


@settings(max_examples=200, deadline=None)
@given(JSON, st.sampled_from(sorted(KEYS)))
def test_no_value_at_any_key_ends_in_anything_but_one_line(value: Any, key: str) -> None:
    recipe: Any = copy.deepcopy(RECIPE)
    *sections, last = key.split(".")
    at = recipe
    for section in sections:
        at = at.setdefault(section, {})
    at[last] = value
    message = loaded_or_told(recipe, [])
    assert not message or message.startswith("recipe: ")


def test_the_configuration_cannot_be_changed() -> None:
    config = loads(RECIPE)
    with pytest.raises(ValidationError):
        config.train.steps = 5


def test_every_field_has_a_description_or_speaks_for_itself() -> None:
    """A free-form or nullable field says what it holds: its type cannot."""
    silent = [key for key in LEAVES if (is_free(key) or is_nullable(key)) and not KEYS[key].description]
    assert silent == []
    assert set(LEAVES) < set(KEYS)
    assert Config.model_fields.keys() <= KEYS.keys()


def test_loading_imports_no_heavy_package() -> None:
    code = (
        "import sys; from tranship.config.load import loads, dump; import tranship;"
        f"dump(loads({RECIPE!r}));"
        "print([m for m in ('torch', 'ray', 'transformers', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
