"""Keys and values of running samples: one tensor for each layer, a row for each slot, grown in steps.

Letters: S slots, G key heads, T columns (positions), D head_dim; the leading 2 is keys, then values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tranship.rollout.native.shape import ModelShape

READ_STEP = 32
"""Columns are read in multiples of this."""

GROW_STEP = 128
"""Columns are allocated in multiples of this."""


def round_up(count: int, step: int) -> int:
    """The least multiple of `step` that is at least `count`."""
    return -(-count // step) * step


class KvCache:
    """The caches of all layers. Columns beyond what was written hold zeros or old, finite values."""

    def __init__(self, shape: ModelShape, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = shape
        self._num_slots = num_slots
        self._dtype = dtype
        self._device = device
        self._columns = 0
        self._layers: list[torch.Tensor] = []

    @property
    def columns(self) -> int:
        """Allocated positions of a slot."""
        return self._columns

    def free(self) -> None:
        """Drop everything."""
        self._layers, self._columns = [], 0

    def reserve(self, columns: int) -> None:
        """Make room for so many positions; at least half as many again when it has to grow, content kept."""
        if columns <= self._columns:
            return
        grown = round_up(max(columns, self._columns * 3 // 2), GROW_STEP)
        shape = (2, self._num_slots, self._shape.num_kv_heads, grown, self._shape.head_dim)
        for index in range(self._shape.num_layers):
            fresh = torch.zeros(shape, dtype=self._dtype, device=self._device)
            if self._columns:
                fresh[:, :, :, : self._columns] = self._layers[index]
                self._layers[index] = fresh
            else:
                self._layers.append(fresh)
        self._columns = grown

    def write_index(self, positions_N: torch.Tensor) -> torch.Tensor:
        """int64 [N, 2 G]: rows of `flat` where slots 0..N-1 keep the keys and values of these positions."""
        heads = self._shape.num_kv_heads
        slot_N = torch.arange(len(positions_N), device=self._device)
        side_2 = torch.arange(2, device=self._device) * self._num_slots
        row = (side_2[None, :, None] + slot_N[:, None, None]) * heads + torch.arange(heads, device=self._device)
        return (row * self._columns + positions_N[:, None, None]).flatten(1)

    def flat(self, layer: int) -> torch.Tensor:
        """The layer's cache as rows [2 S G T, D]."""
        return self._layers[layer].view(-1, self._shape.head_dim)

    def read(self, layer: int, count: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [count x G, columns, D] of slots 0..count-1, as views."""
        both = self._layers[layer][:, :count, :, :columns].flatten(1, 2)
        return both[0], both[1]

    def fill(self, layer: int, slots: Sequence[int], start: int, kv_2GTD: torch.Tensor) -> None:
        """Write the same keys and values into several slots, from position `start` on."""
        stop = start + kv_2GTD.shape[2]
        for slot in slots:
            self._layers[layer][:, slot, :, start:stop] = kv_2GTD

    def move(self, source: int, target: int, columns: int) -> None:
        """Copy a slot's first columns to another slot."""
        for layer in self._layers:
            layer[:, target, :, :columns] = layer[:, source, :, :columns]

    def clear(self, slot: int) -> None:
        """Zero a slot: masked columns must hold finite values, or they reach the sums that skip them."""
        for layer in self._layers:
            layer[:, slot] = 0
