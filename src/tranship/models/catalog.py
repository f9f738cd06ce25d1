"""The models that `tranship model get NAME` knows. A name stands for a function that builds its Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tranship.lookup import resolve
from tranship.models.cache import build_once, model_folder
from tranship.types import UserError

# name -> function(folder: Path, log) that fills an empty folder and checks what it wrote.
CATALOG: Mapping[str, str] = {
    "smollm2-135m": "tranship.models.smollm2:build",
    "tiny-random": "tranship.models.tiny:build",
}


def get(name: str, cache: Path | None = None, log: Callable[[str], None] = print) -> Path:
    """The folder of model `name` in the cache, fetched and converted if it is not there yet.

    cache: another cache folder. log: gets one line per thing that takes time, and one at the end. A second call
    returns at once; calls at the same time build once. Raises UserError for an unknown name, without a network, or
    where a digest differs.
    """
    if name not in CATALOG:
        raise UserError(f"model get: {name!r} is not in the catalog; it has: {', '.join(sorted(CATALOG))}")
    folder = model_folder(name, cache)
    if folder.is_dir():
        return folder
    build = resolve(name, CATALOG, "model get")
    build_once(folder, lambda temporary: build(temporary, log))
    size_mib = sum(file.stat().st_size for file in folder.iterdir()) / 2**20
    log(f"{name}: {size_mib:.0f} MiB in {folder}")
    return folder
