"""Keys and values: dense tables of rows, one for the prompts that running samples share, one for their responses.

Letters: S rows, G key heads, T columns (tokens), D head_dim; the leading 2 is keys, then values (1 where one vector is
both, as with latent attention).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tranship.rollout.native.shape import ModelShape


def num_columns(needed: int, fixed_step: int | None) -> int:
    """Columns to hold `needed` tokens: a multiple of `fixed_step`, or of a step that grows with the length.

    Every column is read at every step, so few are wasted (at most a quarter, from 128 on), and a table that grows
    token by token is laid out anew only a few times.
    """
    step = fixed_step or max(32, 1 << max(0, needed.bit_length() - 3))
    return -(-max(needed, 1) // step) * step


class KvTable:
    """For each layer a tensor [2, S, G, T, D], of which the first rows and the first `columns` columns are read.

    storages: the addresses of each layer's keys and values (of one and the same where a vector is both).

    Unless compiled kernels read it, a row is cleared before it is used again: masked columns still take part in sums,
    so they must hold finite values; and in bf16 the columns that are read must be all that there are (other strides
    make torch's product copy its operands), so the table is laid out anew whenever their number changes. Else it keeps
    room to grow.
    """

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        device: torch.device,
        *,
        fixed_step: int | None = None,
        compiled: bool = False,
    ) -> None:
        self._shape = shape
        self._dtype = dtype
        self._device = device
        self._fixed_step = fixed_step
        self._compiled = compiled
        self._dense = dtype != torch.float32 and not compiled
        self._memory: list[torch.Tensor] = []
        self._views: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._layers: list[torch.Tensor] = []
        self._rows, self._room = 0, 0
        self.columns = 0
        self.storages: list[tuple[int, int]] = []

    @property
    def room(self) -> int:
        """Columns that there is memory for."""
        return self._room

    @property
    def rows(self) -> int:
        """Rows that there is memory for."""
        return self._rows

    @property
    def layout(self) -> tuple[object, ...]:
        """Equal where the same operations on the table read and write the same memory."""
        return self._rows, self._room, self.columns, *self.storages

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self._shape.num_layers

    def free(self) -> None:
        """Drop everything."""
        self._memory, self._layers, self._rows, self._room, self.columns = [], [], 0, 0, 0
        self._views.clear()
        self.storages = []

    def fit(self, used: int, rows: int, needed: int) -> None:
        """Make room for `rows` rows and `needed` tokens, keeping the first `used` rows."""
        columns = num_columns(needed, self._fixed_step)
        if self._dense and self.columns // 2 < columns <= self.columns:
            columns = self.columns
        rows = self._rows if rows <= self._rows else max(8, 1 << (rows - 1).bit_length())
        room = self._room
        if self._dense or columns > room:
            room = columns if self._dense else num_columns(columns * 3 // 2, self._fixed_step)
        if columns != self.columns:
            self._views.clear()
        self.columns = columns
        if (rows, room) != (self._rows, self._room):
            self._lay_out(min(used, self._rows), rows, room)

    def _lay_out(self, used: int, rows: int, room: int) -> None:
        """Change the table's size within its memory, or in more of it."""
        size = (self._shape.kv_sides, rows, self._shape.num_kv_heads, room, self._shape.head_dim)
        kept = min(room, self._room)
        layers = []
        for index in range(self._shape.num_layers):
            content = self._layers[index][:, :used, :, :kept].clone() if used else None
            layer = self._claim(index, math.prod(size)).view(size)
            if content is not None:
                layer[:, :used, :, :kept] = content
                if not self._compiled:
                    layer[:, :used, :, kept:] = 0
            layers.append(layer)
        self._layers, self._rows, self._room = layers, rows, room
        self.storages = [(layer[0].data_ptr(), layer[-1].data_ptr()) for layer in layers]
        self._views.clear()

    def _claim(self, index: int, count: int) -> torch.Tensor:
        """The first `count` elements of a layer's memory; a larger one with half as much again if they exceed it."""
        if index == len(self._memory):
            self._memory.append(torch.empty(0, dtype=self._dtype, device=self._device))
        if count > len(self._memory[index]):
            self._memory[index] = torch.empty(count * 3 // 2, dtype=self._dtype, device=self._device)
        return self._memory[index][:count]

    def read(self, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each layer the keys [count x G, D, T] and values [count x G, T, D] of rows 0..count-1, as views.

        They are made once for a count and a size: making views costs as much as small kernels do.
        """
        if count not in self._views:
            both = [layer[:, :count, :, : self.columns].flatten(1, 2) for layer in self._layers]
            self._views[count] = [(layer[0].transpose(1, 2), layer[-1]) for layer in both]
        return self._views[count]

    def row(self, layer: int, row: int, columns: int) -> torch.Tensor:
        """[2, G, columns, D] of one row, as a view."""
        return self._layers[layer][:, row, :, :columns]

    def write(self, layer: int, row: int, kv_2GTD: torch.Tensor) -> None:
        """Write a row's first columns."""
        self._layers[layer][:, row, :, : kv_2GTD.shape[2]] = kv_2GTD

    def append_index(self, columns_N: torch.Tensor) -> torch.Tensor:
        """int64 [N, sides x G]: the rows of `flat` where rows 0..N-1 keep the token of these columns."""
        heads = self._shape.num_kv_heads
        row_N = torch.arange(len(columns_N), device=self._device)
        side = torch.arange(self._shape.kv_sides, device=self._device) * self._rows
        row = (side[None, :, None] + row_N[:, None, None]) * heads + torch.arange(heads, device=self._device)
        return (row * self._room + columns_N[:, None, None]).flatten(1)

    def flat(self, layer: int) -> torch.Tensor:
        """The layer's tensor as [2 S G T, D]."""
        return self._layers[layer].view(-1, self._shape.head_dim)

    def copy_row(self, source: int, target: int) -> None:
        """Overwrite one row with another."""
        for layer in self._layers:
            layer[:, target] = layer[:, source]

    def clear(self, row: int) -> None:
        """Zero a row, where that is needed: it may hold what another sample left, and that may not be finite."""
        if self._compiled:
            return
        for layer in self._layers:
            layer[:, row] = 0


@dataclass(eq=False)
class PromptRow:
    """A prompt in the table of prompts: where it lies (it may move), its length, and how many hold it."""

    index: int
    length: int
    holders: int = 1


class Prompts:
    """Prompts that are stored once and read by all samples that hold them; rows 0..count-1 are taken."""

    def __init__(self, table: KvTable) -> None:
        self.table = table
        self._rows: list[PromptRow] = []

    @property
    def count(self) -> int:
        """Rows in use."""
        return len(self._rows)

    def add(self, kv_layers: Sequence[torch.Tensor]) -> PromptRow:
        """Store a prompt, given for each layer as [2, G, T, D]; the caller holds it."""
        row = PromptRow(len(self._rows), kv_layers[0].shape[2])
        used = len(self._rows)
        longest = max([row.length, *(other.length for other in self._rows)])
        self.table.fit(used, used + 1, longest)
        self.table.clear(row.index)
        for layer, kv in enumerate(kv_layers):
            self.table.write(layer, row.index, kv)
        self._rows.append(row)
        return row

    def read(self, row: PromptRow) -> list[torch.Tensor]:
        """For each layer [2, G, T, D], as views."""
        return [self.table.row(layer, row.index, row.length) for layer in range(self.table.num_layers)]

    def release(self, row: PromptRow) -> None:
        """One holder less; the last one frees the row, and another one moves into its place."""
        row.holders -= 1
        if row.holders:
            return
        last = self._rows.pop()
        if last is not row:
            self.table.copy_row(last.index, row.index)
            last.index = row.index
            self._rows[row.index] = last

    def free(self) -> None:
        """Drop the table's memory (no prompt may be held)."""
        assert not self._rows, "prompts are still held"
        self.table.free()
