"""The shape of the package: every table of implementations resolves, the low floors stay light, nothing is silent."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import tranship

PACKAGE = Path(tranship.__file__).parent
HEAVY = ("torch", "ray", "transformers", "pyarrow", "tensorboard", "matplotlib", "tranship.trainer")
LIGHT_MODULES = ("tranship", "tranship.types", "tranship.version", "tranship.config", "tranship.lookup", "tranship.cli")


def module_names() -> list[str]:
    """All modules but the scripts that run in the environments of peers."""
    names = (info.name for info in pkgutil.walk_packages([str(PACKAGE)], "tranship."))
    return sorted(name for name in names if not name.endswith("_peer"))


def tables_in(name: str) -> list[tuple[str, str, str]]:
    """(table, entry, target) of the module-level tables that a module's text defines; nothing is imported."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    found = []
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(node.value, ast.Dict):
            if ast.unparse(node.annotation) != "Mapping[str, str]":
                continue
            table = dict(ast.literal_eval(node.value))
            if table and all(":" in target for target in table.values()):
                found += [(f"{name}.{node.target.id}", entry, target) for entry, target in table.items()]
    return found


TABLES = [row for name in module_names() for row in tables_in(name)]


def test_the_tables_are_found() -> None:
    names = {table.rpartition(".")[2] for table, _, _ in TABLES}
    assert names >= {"TRAIN_ENGINES", "ROLLOUT_ENGINES", "ADVANTAGES", "LOSSES", "KL_ESTIMATORS", "REWARDS", "TRACKERS"}


@pytest.mark.parametrize(("table", "entry", "target"), TABLES, ids=lambda value: value.rpartition(".")[2])
def test_every_entry_of_every_table_resolves(table: str, entry: str, target: str) -> None:
    module_name, _, attribute = target.partition(":")
    module = importlib.import_module(module_name)
    assert callable(getattr(module, attribute)), f"{table}[{entry!r}]"


def test_every_table_that_a_module_defines_by_other_means_is_seen_too() -> None:
    """A table built at run time, or annotated otherwise, would escape the test above."""
    seen = {table for table, _, _ in TABLES}
    missed = []
    for name in module_names():
        for attribute, value in vars(importlib.import_module(name)).items():
            if not attribute.isupper() or not isinstance(value, Mapping) or not value:
                continue
            targets = list(value.values())
            if all(isinstance(t, str) and t.startswith("tranship.") and t.count(":") == 1 for t in targets):
                owners = [table for table in seen if table.endswith(f".{attribute}")]
                if not owners:
                    missed.append(f"{name}.{attribute}")
    assert missed == []


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_the_low_floors_and_the_command_line_import_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_every_module_says_what_it_is_for() -> None:
    silent = []
    for file in PACKAGE.rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        if tree.body and not ast.get_docstring(tree):
            silent.append(str(file.relative_to(PACKAGE)))
    assert silent == []


def test_every_public_function_and_class_says_what_comes_back() -> None:
    silent = []
    for file in PACKAGE.rglob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            is_named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            if is_named and not node.name.startswith("_") and not ast.get_docstring(node):
                silent.append(f"{file.relative_to(PACKAGE)}:{node.name}")
    assert silent == []


def test_no_text_is_left_unfinished() -> None:
    marks = ("TO" + "DO", "FIX" + "ME", "X" + "XX", "NotImplemented" + "Error")
    found = [
        f"{file.relative_to(PACKAGE)}:{number}"
        for file in PACKAGE.rglob("*.py")
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if any(mark in line for mark in marks)
    ]
    assert found == []


def test_no_module_is_empty_but_a_package_file() -> None:
    empty = [f for f in PACKAGE.rglob("*.py") if f.name != "__init__.py" and not f.read_text(encoding="utf-8").strip()]
    assert empty == []


def test_the_root_names_are_those_of_the_package() -> None:
    for name in tranship.__all__:
        assert getattr(tranship, name) is not None
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = tranship.nothing_of_the_kind
