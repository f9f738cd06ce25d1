"""Whether the dock's memory is there, and holds a batch: both are said before anything starts, not when it is full."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from tranship.config import Config
from tranship.stages import StageSpec
from tranship.types import UserError

_SHARED_MEMORY = Path("/dev/shm")
# Bytes of a token in each column that has one value per token of the response.
_PER_TOKEN = {
    "response": 4,
    "response_mask": 1,
    "logprobs": 4,
    "policy_versions": 4,
    "ref_logprobs": 4,
    "values": 4,
    "advantages": 4,
    "returns": 4,
    "loss_mask": 1,
}
# Of a row beside its tokens in what one stage writes: identities, lengths, alignment, the words of a reward.
_PER_ROW = 1024


def check_shared_memory(config: Config) -> None:
    """UserError where processes share memory and there is less of it than the dock may take."""
    if config.placement.runtime == "inline" or not _SHARED_MEMORY.is_dir():
        return
    capacity, free = config.dock.capacity_bytes, shutil.disk_usage(_SHARED_MEMORY).free
    if free < capacity:
        smaller = " dock.preset=small, or" if config.dock.preset != "small" else ""
        raise UserError(
            f"{_SHARED_MEMORY} has {free >> 20} MiB free and the dock may take dock.capacity_bytes {capacity} "
            f"({capacity >> 20} MiB): enlarge it (docker: --shm-size), or set{smaller} dock.capacity_bytes to at most "
            f"{free >> 20 << 20}"
        )


def batch_bytes(config: Config, table: Sequence[StageSpec], prompt_tokens: int) -> int:
    """What one batch takes in the dock at most: every response as long as it may be, after prompts that long.

    A group's columns are written in one piece, and a slab's end that the next piece does not fit into stays empty.
    """
    slab, groups, size = config.dock.slab_bytes, config.groups_per_step, config.group_size
    tokens = size * config.rollout.max_response_tokens
    pieces = [tokens * sum(_PER_TOKEN.get(name, 0) for name in stage.writes) + size * _PER_ROW for stage in table]
    rest = sum(pieces) + 4 * prompt_tokens + _PER_ROW
    largest = max(pieces)
    if 2 * largest <= slab:
        return -(-groups * rest // (slab - largest)) * slab
    return groups * (-(-largest // slab) * slab + 2 * (rest - largest))


def check_room(config: Config, table: Sequence[StageSpec], num_workers: int, prompt_tokens: int) -> None:
    """UserError if the dock cannot hold a batch whose responses are as long as they may be.

    prompt_tokens: of the longest prompt. Each worker, and the coordinator, may have a slab that is not full yet. Where
    responses are recorded, not sampled, how long they are is not known here.
    """
    if config.algorithm.flow in ("sft", "dpo"):
        return
    slabs = num_workers + 1
    need, room = batch_bytes(config, table, prompt_tokens), config.dock.capacity_bytes - slabs * config.dock.slab_bytes
    if need > room:
        wanted = -(-(need + slabs * config.dock.slab_bytes) >> 20) << 20
        raise UserError(
            f"a batch of {config.train.batch_size} responses of up to {config.rollout.max_response_tokens} tokens is "
            f"up to {need / 2**20:.1f} MiB in the dock, and dock.capacity_bytes {config.dock.capacity_bytes} leaves "
            f"{max(0, room) / 2**20:.1f} MiB beside {slabs} slabs that are being written: set "
            f"dock.capacity_bytes={wanted}, or lower train.batch_size or rollout.max_response_tokens"
        )
