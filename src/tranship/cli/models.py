"""`tranship model ...`: the models that can be fetched by name."""

from __future__ import annotations

from typing import Annotated

import typer

models = typer.Typer(help="Fetch models by name.", rich_markup_mode=None)


@models.command("get")
def get(name: Annotated[str, typer.Argument(metavar="NAME", help="See `tranship model list`.")]) -> int:
    """Fetch a model into the cache, check it, and print its folder."""
    from tranship.models import catalog

    print(catalog.get(name))
    return 0


@models.command("list")
def show() -> int:
    """Print the names, and where the fetched ones lie.

    `tranship model get` and `model.path` know these names.
    """
    from tranship.models import catalog
    from tranship.models.cache import model_folder

    for name in sorted(catalog.CATALOG):
        folder = model_folder(name)
        print(f"{name:<16} {folder if folder.is_dir() else 'not fetched'}")
    return 0
