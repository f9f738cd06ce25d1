"""What the dock refuses. Each error carries one sentence, so that it crosses a process border unchanged."""

from __future__ import annotations

from tranship.types import RunError


class StaleLease(RuntimeError):
    """The lease is gone, or no longer covers the rows: somebody else has them, or they have left the dock."""


class LeaseLost(StaleLease):
    """The lease is gone with the process that gave it, which may have passed on what was said under it last."""


class StaleSlab(StaleLease):
    """The slab has been recycled, was taken from its owner, or was lost with its node: the bytes cannot be had."""


class DockFull(RunError):
    """The payload does not fit into the dock's byte budget, or into the machine's shared memory."""
