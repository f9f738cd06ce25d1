"""`tranship COMMAND ...`: each command reads its arguments, calls one function of the package and says what came."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import TyperException

from tranship.cli.evaluate import evaluate
from tranship.cli.ledger import ledger
from tranship.cli.models import models
from tranship.cli.serve import serve
from tranship.cli.show import shown
from tranship.cli.threads import let_idle_threads_sleep
from tranship.config import load
from tranship.types import RunError, UserError
from tranship.version import __version__

EXIT_RUN_ERROR, EXIT_USER_ERROR, EXIT_INTERRUPTED = 1, 2, 130

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Reinforcement learning of language models as two flows, samples and weights.",
)
app.add_typer(models, name="model")
app.command("eval")(evaluate)
app.command("ledger")(ledger)
app.command("serve")(serve)

Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="A YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Put over the recipe: train.steps=5.", show_default=False),
]


class Resume(StrEnum):
    """Whether to go on from the run folder's last checkpoint."""

    never = "never"
    auto = "auto"


@app.command()
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, show it, and stop there.")] = False,
    resume: Annotated[
        Resume | None, typer.Option(help="auto: go on from the last checkpoint of run.dir.", show_default=False)
    ] = None,
) -> int:
    """Train as a recipe says."""
    settings = [*(overrides or ()), *([f"run.resume={resume.value}"] if resume else ())]
    config = load(recipe, settings)
    let_idle_threads_sleep()
    from tranship.trainer import preflight, run

    if dry_run:
        lines = preflight(config).lines()
        _say(shown(config), *lines, "dry run: everything was checked, nothing was started")
        return 0
    return EXIT_INTERRUPTED if run(config).status == "stopped" else 0


@app.command()
def show(recipe: Recipe, overrides: Overrides = None) -> int:
    """Print the whole configuration and the stages.

    The output is a recipe again: the table of stages comes as comments.
    """
    _say(shown(load(recipe, overrides or ())))
    return 0


@app.command()
def check(recipe: Recipe, overrides: Overrides = None) -> int:
    """Find what is wrong before anything starts.

    Checks a recipe against this machine, the model, the data and the reward.
    """
    config = load(recipe, overrides or ())
    from tranship.trainer import preflight

    _say(*preflight(config).lines(), "nothing is wrong")
    return 0


@app.command()
def bench(
    name: Annotated[str, typer.Argument(metavar="NAME", help="dock, rollout, e2e, ...", show_default=False)],
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repeats.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write every figure there.", show_default=False)
    ] = None,
    workloads: Annotated[str, typer.Option(help="Only these: W,T.", show_default=False)] = "",
    sides: Annotated[str, typer.Option(help="Only these: ours,plain_loop.", show_default=False)] = "",
    rounds: Annotated[int | None, typer.Option(min=1, help="Counted repeats of each side.", show_default=False)] = None,
) -> int:
    """Run one benchmark and print its table."""
    from tranship.bench import BENCHES
    from tranship.lookup import resolve

    if name not in BENCHES:
        raise UserError(f"bench: {name!r} is not known; use one of: {', '.join(sorted(BENCHES))}")
    run = resolve(name, BENCHES, "bench")
    return run(quick=quick, json_file=json_file, workloads=workloads, sides=sides, rounds=rounds)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    if version:
        _say(f"tranship {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        _say(context.get_help())
        raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script. Ends the process: 0, 2 for what a user gave (`error: ...`), 1 for a run that cannot go on
    (`stopped: ...`), 130 when interrupted; anything else is a bug and shows its traceback."""
    sys.exit(_code(arguments))


def _code(arguments: Sequence[str] | None) -> int:
    try:
        code = app(args=arguments, standalone_mode=False, prog_name="tranship") or 0
    except UserError as error:
        return _fail("error", str(error), EXIT_USER_ERROR)
    except TyperException as error:
        return _fail("error", _usage(error.format_message()), EXIT_USER_ERROR)
    except RunError as error:
        return _fail("stopped", str(error), EXIT_RUN_ERROR)
    return _fail("stopped", "interrupted", code) if code == EXIT_INTERRUPTED else code


def _usage(message: str) -> str:
    option = re.fullmatch(r"No such option: -+(\w+\..*)", message)
    if option:
        return f"settings are written without dashes: {option[1]}=VALUE"
    return f"{message} (see tranship --help)"


def _fail(word: str, message: str, code: int) -> int:
    print(f"{word}: {' '.join(message.split())}", file=sys.stderr)
    return code


def _say(*lines: str) -> None:
    print("\n".join(lines))
