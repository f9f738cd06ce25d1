"""A configuration as text that is a recipe again, with its table of stages."""

from __future__ import annotations

from tranship.config import Config
from tranship.config.load import dump


def shown(config: Config) -> str:
    """The resolved YAML, and the stages of its algorithm as comments."""
    from tranship.stages import check_table, stage_table

    table = stage_table(config.algorithm, config.reward.model)
    check_table(table)
    rows = [("stage", "reads", "writes"), *((s.name, ", ".join(s.reads), ", ".join(s.writes) or "-") for s in table)]
    width = max(len(row[0]) for row in rows)
    lines = [f"# {name:<{width}}  {reads}  ->  {writes}" for name, reads, writes in rows]
    dock = config.dock
    memory = f"{dock.slab_bytes / 2**20:g} MiB each, {dock.capacity_bytes / 2**20:g} MiB at most"
    lines.append(f"# dock: slabs of {memory}, {dock.prefault_slabs} made at the start (preset {dock.preset})")
    return "\n".join([dump(config), *lines])
