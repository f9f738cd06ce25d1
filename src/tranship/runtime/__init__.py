"""Where hosted objects live: `inline` (this process) or `ray` (processes of a Ray cluster). Knows no dock, no stage."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from tranship.lookup import resolve
from tranship.runtime.base import (
    CallTimeout,
    Context,
    Handle,
    Kind,
    ObjectStore,
    Pending,
    ProcessDied,
    Runtime,
    RuntimeOptions,
    ServiceProxy,
)
from tranship.types import UserError

RUNTIMES: Mapping[str, str] = {
    "inline": "tranship.runtime.inline:InlineRuntime",
    "ray": "tranship.runtime.ray_driver:RayRuntime",
}


def check_runtime(name: str) -> None:
    """Raise UserError if the packages that a runtime needs are missing."""
    if name == "ray" and importlib.util.find_spec("ray") is None:
        raise UserError("placement.runtime=ray needs the ray extra: pip install 'tranship[ray]'")


def start_runtime(name: str, options: RuntimeOptions | None = None) -> Runtime:
    """A running runtime, an entry of RUNTIMES. Raises UserError if what it needs is missing."""
    check_runtime(name)
    return resolve(name, RUNTIMES, "placement.runtime")(options or RuntimeOptions())


__all__ = [
    "RUNTIMES",
    "CallTimeout",
    "Context",
    "Handle",
    "Kind",
    "ObjectStore",
    "Pending",
    "ProcessDied",
    "Runtime",
    "RuntimeOptions",
    "ServiceProxy",
    "check_runtime",
    "start_runtime",
]
