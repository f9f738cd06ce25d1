"""What the pages show works: commands, recipes and Python of README.md, CONTRIBUTING.md and all of docs/.

A page is worked through from top to bottom in a folder of its own, which holds the recipes made small: a tiny model,
two steps, eight tokens. A comment just before a block says what is special about it:

    <!-- file: my_reward.py -->   save the block under this name, for the blocks that follow
    <!-- run -->                  really run the `tranship train`, `check` and `eval` lines of the block
    <!-- not run: why -->         check its syntax only

Without one: `yaml` is loaded (a fragment is put over a small recipe), `python` is run, and of `bash` each line is a
`tranship` command that is checked by loading its recipe with its overrides, a `make` target that exists, or one of the
few other programs that a reader uses to get that far.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tranship.bench import BENCHES
from tranship.cli import main
from tranship.config import load
from tranship.config.load import loads
from tranship.config.yaml_text import read, write

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
BIN = Path(sys.executable).parent
OTHER_PROGRAMS = {"git", "cd", "pip", "python", "python3", "source", ".", "export", "ls", "less", "cat", "tensorboard"}
UNCHECKED_LANGUAGES = {"", "text", "console", "json", "mermaid"}
SMALL: dict[str, Any] = {
    "model": {"path": "tiny-random"},
    "data": {"train": {"source": "sums", "args": {"low": 1, "high": 20}}},
    "rollout": {"group_size": 4, "max_response_tokens": 8, "dtype": "fp32"},
    "train": {"steps": 2, "batch_size": 16, "precision": "fp32"},
    "observe": {"console": "plain"},
}


@dataclass(frozen=True)
class Block:
    """One fenced block of a page. line: of its first line of text."""

    page: Path
    line: int
    language: str
    text: str
    comment: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks_of(page: Path, text: str) -> Iterator[Block]:
    comment, fence, start, body = "", None, 0, []
    for number, line in enumerate(text.splitlines(), 1):
        if fence is not None:
            if line.strip() == "```":
                yield Block(page, start, fence, "\n".join(body) + "\n", comment)
                comment, fence = "", None
            else:
                body.append(line)
        elif opened := re.fullmatch(r"```(\w*).*", line.strip()):
            fence, start, body = opened[1], number + 1, []
        elif said := re.fullmatch(r"<!--\s*(.*?)\s*-->", line.strip()):
            comment = said[1]
        elif line.strip():
            comment = ""
    assert fence is None, f"{page.name}: the block at line {start} is not closed"


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        inner = result.get(key)
        result[key] = merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return result


def lines_of(block: Block) -> Iterator[list[str]]:
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


class Desk:
    """The folder in which one page is worked through."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, "TRANSHIP_CACHE": str(cache), "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
        for recipe in RECIPES:
            values = read(recipe.read_text(encoding="utf-8"), recipe.name)
            small = merged(values, SMALL | {"data": {"val": {"limit": 8}} if "val" in values["data"] else {}})
            copy = folder / recipe.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(write(small))

    def work(self, block: Block) -> None:
        kind, _, rest = block.comment.partition(":")
        if kind == "not run":
            assert rest.strip(), f"{block}: say why it is not run"
            self._check_syntax(block)
            return
        if kind == "file":
            file = self.folder / rest.strip()
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text)
        if block.language == "yaml":
            self._load(block)
        elif block.language == "python":
            self._python(block)
        elif block.language == "bash":
            for words in lines_of(block):
                self._command(words, block, really=kind == "run")
        else:
            assert block.language in UNCHECKED_LANGUAGES, f"{block}: unknown language {block.language!r}"

    def _check_syntax(self, block: Block) -> None:
        if block.language == "python":
            ast.parse(block.text)
        elif block.language == "yaml":
            read(block.text, str(block))
        elif block.language == "bash":
            assert list(lines_of(block)), f"{block} is empty"

    def _load(self, block: Block) -> None:
        values = read(block.text, str(block))
        assert isinstance(values, dict), f"{block}: not a recipe nor a part of one"
        whole = "model" in values and "train" in values
        # A source of the block's own has arguments of its own.
        small = SMALL if "train" not in values.get("data", {}) else {k: v for k, v in SMALL.items() if k != "data"}
        loads(values if whole else merged(small, values), name=str(block))

    def _python(self, block: Block) -> None:
        with self._at_desk():
            try:
                exec(compile(block.text, str(block), "exec"), {"__name__": "__main__"})
            except (Exception, SystemExit) as error:
                raise AssertionError(f"{block}: {type(error).__name__}: {error}") from error

    def _command(self, words: list[str], block: Block, really: bool) -> None:
        program, *arguments = words
        if program == "make":
            targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
            wanted = [word for word in arguments if "=" not in word and not word.startswith("-")]
            assert set(wanted) <= targets, f"{block}: make has no target {sorted(set(wanted) - targets)}"
        elif program == "tranship":
            self._tranship(arguments, block, really)
        elif Path(program).name == "pytest":
            gone = [word for word in arguments if "/" in word and not (ROOT / word).exists()]
            assert not gone, f"{block}: there is no {gone}"
        else:
            assert program in OTHER_PROGRAMS, f"{block}: {program} is not checked: mark the block as not run, with why"

    def _tranship(self, arguments: list[str], block: Block, really: bool) -> None:
        heavy = {"train", "check", "eval", "bench", "serve"}
        command = arguments[0] if arguments else ""
        if really:
            self._execute(["tranship", *arguments], block)
            return
        if command not in {*heavy, "model"}:
            self._say(arguments, block)
            return
        known = self._say([command, "--help"], block)
        unknown = [word for word in arguments if word.startswith("--") and not re.search(rf"{word}\b", known)]
        assert not unknown, f"{block}: tranship {command} has no {unknown}"
        if command in {"train", "check"}:
            words = [word for word in arguments[1:] if not word.startswith("-") and word not in ("never", "auto")]
            load(self.folder / words[0], words[1:])
        elif command == "eval":
            self._evaluation(arguments[1:], block)
        elif command == "bench":
            assert arguments[1] in BENCHES, f"{block}: no benchmark {arguments[1]}"
        elif command == "model" and arguments[1] == "get":
            assert arguments[2] in self._say(["model", "list"], block), f"{block}: no model {arguments[2]}"

    def _evaluation(self, arguments: list[str], block: Block) -> None:
        """A recipe that is named loads with its overrides; without one the settings have to be those of any recipe."""
        model, *others = arguments
        assert not model.startswith("-"), f"{block}: tranship eval begins with a model"
        named = others.index("--recipe") + 1 if "--recipe" in others else None
        recipe = self.folder / (others[named] if named is not None else "recipes/demo.yaml")
        load(recipe, [word for word in others if re.match(r"[a-z_]+\.[\w.]+=", word)])

    @contextlib.contextmanager
    def _at_desk(self) -> Iterator[None]:
        with contextlib.chdir(self.folder), pytest.MonkeyPatch.context() as patch:
            for name in ("TRANSHIP_CACHE", "PATH"):
                patch.setenv(name, self.env[name])
            yield

    def _say(self, arguments: list[str], block: Block) -> str:
        """What `tranship` says, in this process: starting one for each line would take most of the time."""
        with self._at_desk(), contextlib.redirect_stdout(io.StringIO()) as said, pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0, f"{block}: tranship {arguments} ended with {ended.value.code}"
        return said.getvalue()

    def _execute(self, command: list[str], block: Block) -> str:
        done = subprocess.run(command, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, f"{block}: {command} ended with {done.returncode}:\n{done.stderr[-3000:]}"
        return done.stdout


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    env = {**os.environ, "TRANSHIP_CACHE": str(folder)}
    subprocess.run([BIN / "tranship", "model", "get", "tiny-random"], env=env, check=True, timeout=120)
    return folder


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_the_page_shows_works(page: Path, tmp_path: Path, cache: Path) -> None:
    desk = Desk(tmp_path, cache)
    for block in blocks_of(page, page.read_text(encoding="utf-8")):
        desk.work(block)


@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_every_recipe_loads(recipe: Path) -> None:
    load(recipe)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_to_files_of_the_project_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), f"{name_of(page)} links to {target}, which is not there"


PAGE = """
<!-- file: mine.py -->
```python
x = 1
```
text
```bash
tranship show recipes/demo.yaml \\
  {override}
```
"""


def test_blocks_are_found_with_their_comments_and_lines() -> None:
    first, second = blocks_of(Path("p.md"), PAGE)
    assert (first.language, first.text, first.comment, first.line) == ("python", "x = 1\n", "file: mine.py", 4)
    assert (second.language, second.comment, second.line) == ("bash", "", 8)
    assert list(lines_of(second)) == [["tranship", "show", "recipes/demo.yaml", "{override}"]]


@pytest.mark.parametrize(
    ("language", "text", "comment"),
    [
        ("bash", "tranship show recipes/demo.yaml train.stepps=3", ""),
        ("bash", "tranship train recipes/demo.yaml rollout.n=3", ""),
        ("bash", "tranship sail", ""),
        ("bash", "tranship model get nothing-like-it", ""),
        ("bash", "tranship eval runs/demo --sample-count 4", ""),
        ("bash", "tranship eval runs/demo data.val.limits=3", ""),
        ("bash", "tranship eval smollm2-135m --recipe recipes/none.yaml", ""),
        ("bash", "tranship serve runs/demo --prot 8001", ""),
        ("bash", "tranship bench nothing-like-it", ""),
        ("bash", "make sense", ""),
        ("bash", "sail away", ""),
        ("bash", ".venv/bin/pytest tests/unit/no_such_folder", ""),
        ("bash", "tranship train recipes/demo.yaml", "not run:"),
        ("yaml", "rollout: {n: 3}", ""),
        ("yaml", "model: {path: x}\ntrain: {steps: 0}", ""),
        ("python", "import tranship\ntranship.no_such_name", ""),
        ("python", "x = (", "not run: a reason"),
        ("cobol", "MOVE A TO B", ""),
    ],
)
def test_a_page_that_shows_something_wrong_fails(
    language: str, text: str, comment: str, tmp_path: Path, cache: Path
) -> None:
    block = Block(Path("p.md"), 1, language, text, comment)
    with pytest.raises((AssertionError, ValueError, SyntaxError)):
        Desk(tmp_path, cache).work(block)
