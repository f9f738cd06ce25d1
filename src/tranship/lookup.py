"""Names to things: the entries of our tables, `module:name` and `file.py:name`. Imports only what is asked for."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tranship.types import UserError


def resolve(name: str, table: Mapping[str, str], what: str) -> Any:
    """The object that `name` stands for: an entry of `table` (a `module:name` string), or such a string itself.

    what: the setting that named it, for the error ("algorithm.loss"). Raises UserError with the known names.
    """
    target = table.get(name, name)
    module_name, _, attribute = target.rpartition(":")
    if not module_name:
        known = ", ".join(sorted(table)) or "none"
        raise UserError(f"{what}: {name!r} is not known; use one of: {known}; or module:name, or file.py:name")
    module = _load_file(module_name, what) if module_name.endswith(".py") else _load_module(module_name, what)
    if not hasattr(module, attribute):
        raise UserError(f"{what}: {module_name} has no {attribute!r}: check the name after the colon in {name!r}")
    return getattr(module, attribute)


def _load_module(name: str, what: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise UserError(f"{what}: importing {name!r} failed: {type(error).__name__}: {error}") from error


def _load_file(path: str, what: str) -> Any:
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise UserError(f"{what}: there is no file {file}: give its path from here, or an absolute one")
    # The same in every process, so that what the file defines can travel between them.
    name = f"_tranship_user_{hashlib.blake2b(str(file).encode(), digest_size=8).hexdigest()}_{file.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None, file
    assert spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        raise UserError(f"{what}: {file} does not import: {type(error).__name__}: {error}") from error
    return module
