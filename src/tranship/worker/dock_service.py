"""The dock as a process of the run: in this one where there is only one, else in one of its own."""

from __future__ import annotations

from tranship.config import Config
from tranship.dock import Dock, StageNeeds
from tranship.runtime import Context
from tranship.stages import StageSpec


def make_dock(config: Config, table: tuple[StageSpec, ...], run_id: str, shared: bool, context: Context) -> Dock:
    """The dock of a run. shared: payload in shared memory, since other processes read it."""
    del context
    return Dock(
        [StageNeeds(stage.name, stage.reads, "group") for stage in table],
        run_id=run_id,
        batch_groups=config.groups_per_step,
        staleness=config.dock.staleness,
        on_stale=config.dock.on_stale,
        lease_s=config.dock.lease_s,
        slab_bytes=config.dock.slab_bytes,
        capacity_bytes=config.dock.capacity_bytes,
        shared=shared,
        ordered=config.run.deterministic or config.dock.staleness == 0,
        refill=config.algorithm.dynamic_sampling,
    )
