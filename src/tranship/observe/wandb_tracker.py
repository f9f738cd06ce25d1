"""Metrics to Weights & Biases, online or (WANDB_MODE=offline) into files for `wandb sync`. Needs the extra `wandb`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tranship.observe.trackers import kept_id

_STEP = "training/global_step"
# Seconds between two writes of the offline file; W&B's own 15 would lose a killed run's last steps.
_FLUSH = ("WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL", "1")


class WandbTracker:
    """A W&B run whose files lie in RUN/wandb. Its id is in RUN/wandb/run_id, and a resumed run goes on under it.

    Charts are over training/global_step: W&B's own step cannot go back to a step that is done again. WANDB_ENTITY,
    WANDB_MODE, WANDB_BASE_URL and the other variables of W&B are honoured.
    """

    def __init__(self, run_dir: Path, resumed_step: int | None, *, project: str, config: Mapping[str, Any]) -> None:
        import wandb

        os.environ.setdefault(*_FLUSH)
        self._run = wandb.init(
            project=project,
            name=run_dir.resolve().name,
            id=kept_id(run_dir / "wandb", resumed_step),
            dir=str(run_dir),
            resume="allow",
            config=dict(config),
            allow_val_change=True,
            reinit="create_new",
            # W&B would stand between the live view and the terminal.
            settings=wandb.Settings(console="off"),
        )
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)

    def log(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """One row with training/global_step; the kind shows in the names (val/...)."""
        self._run.log({**metrics, _STEP: step})

    def close(self) -> None:
        """Send, or write, what is left."""
        self._run.finish()
