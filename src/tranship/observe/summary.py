"""`summary.json`: what a run came to, written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tranship.observe.machine import machine, versions

# The keys that every summary has; a number that the run does not have is null.
REQUIRED = (
    "status",
    "steps",
    "val_before",
    "val_after",
    "val_greedy_before",
    "val_greedy_after",
    "val_well_formed_before",
    "val_well_formed_after",
    "train_seconds",
    "tokens_per_s",
    "tokens_generated",
    "invalid",
    "ledger",
    "versions",
    "machine",
)


def write_summary(run_dir: Path, values: Mapping[str, Any]) -> Path:
    """Write `values` to RUN/summary.json atomically, with `machine` and `versions` added if absent; its path.

    Every key of REQUIRED must be there. Raises ValueError for NaN and infinities: say null where there is no number.
    """
    whole = {"machine": machine(), "versions": versions()} | dict(values)
    missing = [key for key in REQUIRED if key not in whole]
    assert not missing, f"summary without {missing}"
    path = run_dir / "summary.json"
    temporary = path.with_name("summary.json.part")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(whole, file, indent=2, ensure_ascii=False, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return path
