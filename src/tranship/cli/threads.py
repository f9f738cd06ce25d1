"""What must be said to OpenMP before torch is loaded."""

from __future__ import annotations

import os


def let_idle_threads_sleep() -> None:
    """Read by OpenMP when torch is loaded. Threads that spin while they wait make a step several times slower as soon
    as anything else wants one of the cores; on an idle machine sleeping costs little. Whoever set it keeps it."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
