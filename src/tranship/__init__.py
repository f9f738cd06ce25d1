"""tranship: reinforcement learning of language models as two flows, samples and weights.

import tranship
config = tranship.load("recipes/demo.yaml", ["train.steps=5"])
result = tranship.run(config)
print(result.summary["val_after"])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tranship.version import __version__

if TYPE_CHECKING:
    from tranship.config import Config, load
    from tranship.trainer import Result, run

__all__ = ["Config", "Result", "__version__", "load", "run"]

_LAZY = {
    "Config": "tranship.config",
    "load": "tranship.config",
    "Result": "tranship.trainer",
    "run": "tranship.trainer",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that `tranship --help` loads neither torch nor ray."""
    if name not in _LAZY:
        raise AttributeError(f"module 'tranship' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
