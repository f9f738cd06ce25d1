from __future__ import annotations

import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

import tranship.cli.app as app_module
from tranship.config import Config, load
from tranship.config.yaml_text import read
from tranship.types import RunError, UserError
from tranship.version import __version__

RECIPE = "model: {path: tiny-random}\ndata: {train: {source: sums}}\ntrain: {steps: 3}\n"


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return str(path)


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        app_module.main(list(arguments))
    assert isinstance(caught.value.code, int)
    return caught.value.code


class FakeTrainer(types.ModuleType):
    """Stands for tranship.trainer: keeps what it was given, and answers as told."""

    def __init__(self) -> None:
        super().__init__("tranship.trainer")
        self.status = "completed"
        self.error: BaseException | None = None
        self.ran: list[Config] = []
        self.checked: list[Config] = []

    def run(self, config: Config) -> types.SimpleNamespace:
        self.ran.append(config)
        if self.error:
            raise self.error
        return types.SimpleNamespace(status=self.status)

    def preflight(self, config: Config) -> types.SimpleNamespace:
        self.checked.append(config)
        if self.error:
            raise self.error
        return types.SimpleNamespace(lines=lambda: ["model     tiny", "batch     8"])


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> FakeTrainer:
    fake = FakeTrainer()
    monkeypatch.setitem(sys.modules, "tranship.trainer", fake)
    return fake


def test_help_answers_within_two_seconds_and_imports_nothing_heavy() -> None:
    code = (
        "import sys, tranship.cli\n"
        "try: tranship.cli.main(['--help'])\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = [m for m in ('torch', 'ray', 'transformers', 'pyarrow', 'matplotlib') if m in sys.modules]\n"
        "assert not heavy, heavy\n"
    )
    seconds = []
    while not seconds or (min(seconds) >= 2 and len(seconds) < 3):  # a busy machine may need another try
        begin = time.monotonic()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        seconds.append(time.monotonic() - begin)
        assert done.returncode == 0, done.stderr
        for command in ("train", "show", "check", "model", "bench", "--version"):
            assert command in done.stdout
    assert min(seconds) < 2


@pytest.mark.parametrize(
    "arguments", [["--help"], ["train", "--help"], ["model", "-h"], ["model", "get", "--help"], []]
)
def test_help_of_every_kind(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*arguments) == 0
    assert capsys.readouterr().out.startswith("Usage: tranship")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--version") == 0
    assert capsys.readouterr().out == f"tranship {__version__}\n"


def test_train_runs_the_recipe_with_its_overrides(recipe: str, trainer: FakeTrainer) -> None:
    assert call("train", recipe, "train.steps=5", "--resume", "auto", "rollout.group_size=4") == 0
    (config,) = trainer.ran
    assert (config.train.steps, config.rollout.group_size, config.run.resume) == (5, 4, "auto")


def test_train_leaves_resume_to_the_recipe_unless_told(recipe: str, trainer: FakeTrainer) -> None:
    assert call("train", recipe, "run.resume=auto") == 0
    assert trainer.ran[0].run.resume == "auto"


def test_dry_run_checks_and_starts_nothing(
    recipe: str, trainer: FakeTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("train", recipe, "--dry-run") == 0
    assert trainer.ran == []
    assert len(trainer.checked) == 1
    out = capsys.readouterr().out
    assert "model     tiny" in out
    assert "steps: 3" in out


def test_check_prints_what_the_run_would_use(
    recipe: str, trainer: FakeTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("check", recipe, "train.steps=9") == 0
    assert trainer.checked[0].train.steps == 9
    assert "batch     8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("steps is -1:\n  use 1"), 2, "error: steps is -1: use 1\n"),
        (RunError("the sampler ended"), 1, "stopped: the sampler ended\n"),
        (KeyboardInterrupt(), 130, "stopped: interrupted\n"),
    ],
)
def test_errors_are_one_line_with_their_code(
    error: BaseException, code: int, line: str, recipe: str, trainer: FakeTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer.error = error
    assert call("train", recipe) == code
    assert capsys.readouterr().err == line


def test_a_bug_is_not_hidden(recipe: str, trainer: FakeTrainer) -> None:
    trainer.error = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError):
        app_module.main(["train", recipe])


def test_a_run_that_was_stopped_ends_as_interrupted(recipe: str, trainer: FakeTrainer) -> None:
    trainer.status = "stopped"
    assert call("train", recipe) == 130


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "RECIPE", "train.optimizer.learning_rte=1"], "did you mean train.optimizer.learning_rate?"),
        (["show", "RECIPE", "rollout.n=4"], "rollout.group_size"),
        (["check", "RECIPE", "train.steps=ten"], "an integer"),
        (["show", "nowhere.yaml"], "there is no recipe nowhere.yaml"),
        (["train"], "RECIPE"),
        (["train", "RECIPE", "--train.steps=4"], "without dashes: train.steps=VALUE"),
        (["train", "RECIPE", "--resume", "maybe"], "'never', 'auto'"),
        (["sail"], "sail"),
        (["model"], "Missing command"),
        (["model", "get", "nope"], "smollm2-135m"),
        (["bench", "nope"], "e2e"),
    ],
)
def test_wrong_use_is_one_line_and_code_2(
    arguments: list[str], words: str, recipe: str, trainer: FakeTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*[recipe if argument == "RECIPE" else argument for argument in arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert words in err
    assert trainer.ran == []


def test_show_prints_a_recipe_again_and_the_stages(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("show", recipe, "algorithm.kl.coef=0.1") == 0
    out = capsys.readouterr().out
    again = tmp_path / "again.yaml"
    again.write_text(out)
    assert load(again) == load(recipe, ["algorithm.kl.coef=0.1"])
    assert read(out, "out")["train"]["steps"] == 3
    assert [line.split()[1] for line in out.splitlines() if line.startswith("# ")][:4] == [
        "stage",
        "rollout",
        "reward",
        "reference",
    ]


def test_model_list_says_which_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRANSHIP_CACHE", str(tmp_path))
    (tmp_path / "models" / "tiny-random").mkdir(parents=True)
    assert call("model", "list") == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["smollm2-135m"] == "not fetched"
    assert lines["tiny-random"] == str(tmp_path / "models" / "tiny-random")


def test_bench_calls_the_function_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my_bench.py"
    arguments = "quick, json_file, workloads, sides, rounds"
    file.write_text(f"def main({arguments}):\n    print({arguments})\n    return 3\n")
    fake = types.ModuleType("tranship.bench")
    fake.BENCHES = {"mine": f"{file}:main"}
    monkeypatch.setitem(sys.modules, "tranship.bench", fake)
    assert call("bench", "mine", "--quick", "--json", "out.json", "--workloads", "W", "--rounds", "2") == 3
    assert capsys.readouterr().out == "True out.json W  2\n"


def test_the_console_script_is_installed_and_is_this_main() -> None:
    from importlib.metadata import entry_points

    (script,) = [point for point in entry_points(group="console_scripts") if point.name == "tranship"]
    assert script.load() is app_module.main
