"""Decode steps that a device does again without being told: recorded once as a graph, then replayed.

On a GPU the host takes longer to ask for the hundreds of small operations of a step than the device takes to do them. A
graph has fixed shapes and addresses, so rows, prompts and columns are rounded up, and what a step reads of the host's
lies in kept memory. Rows that stand for nothing read token 0 of no prompt, in slots that no sample has.

Letters: N rows, P prompts, G key heads, W the most rows that share a prompt, V vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tranship.rollout.native.cache import KvTable
from tranship.rollout.native.decode_attention import DecodeRows, Sharing
from tranship.rollout.native.shape import ModelShape
from tranship.types import UserError

Record = Callable[[Callable[[], None]], Callable[[], None]]
"""Records what a function asks of the device; returns what does the same again. The function has run before."""

COLUMNS = 128
"""Keys and values are read up to a multiple of so many."""
MAX_GRAPHS = 64


def cuda_recorder(device: torch.device) -> Record:
    """Records CUDA graphs, which share their memory: what one leaves is read before another one runs."""
    pool: list[Any] = []

    def record(run: Callable[[], None]) -> Callable[[], None]:
        with torch.cuda.device(device):
            if not pool:
                pool.append(torch.cuda.graph_pool_handle())
            graph = torch.cuda.CUDAGraph()
            # Other threads of this process may ask for memory meanwhile.
            with torch.cuda.graph(graph, pool=pool[0], capture_error_mode="thread_local"):
                run()
        return graph.replay

    return record


class RecordedDecode:
    """Runs a decode step as a graph from its second time in one shape on, when it is recorded.

    run: the step, which asks nothing of the host that depends on values. max_rows: slots of the batch. What it returns
    holds until the next step. `clear` must follow every change of the weights' addresses.
    """

    def __init__(
        self,
        run: Callable[[DecodeRows, KvTable, KvTable], torch.Tensor],
        record: Record,
        device: torch.device,
        *,
        max_rows: int,
        vocab: int,
    ) -> None:
        self._run = run
        self._record = record
        self._device = device
        self._size = round_up(max_rows), vocab
        self._logits: torch.Tensor | None = None
        self._inputs: dict[tuple[int, int, int], _Inputs] = {}
        self._steps: OrderedDict[Any, Callable[[], None] | None] = OrderedDict()

    def clear(self) -> None:
        """Drop all graphs and what they read."""
        self._steps.clear()
        self._inputs.clear()
        self._logits = None

    def __call__(self, rows: DecodeRows, prompts: KvTable, responses: KvTable) -> torch.Tensor:
        """Logits float32 [N, V] of one token of each row."""
        if self._logits is None:
            self._logits = torch.empty(self._size, dtype=torch.float32, device=self._device)
        inputs = self._fill(rows)
        padded = inputs.rows
        assert responses.rows >= len(padded.token_N), "fewer rows in the cache than in the step"
        assert prompts.rows >= padded.sharing.num_prompts, "fewer prompts in the cache than in the step"
        out = self._logits[: len(padded.token_N)]

        def step() -> None:
            out.copy_(self._run(padded, prompts, responses))

        key = (inputs.size, prompts.layout, responses.layout)
        if key not in self._steps:
            self._steps[key] = None
            if len(self._steps) > MAX_GRAPHS:
                self._steps.popitem(last=False)
            step()
            return out[: len(rows.token_N)]
        replay = self._steps[key]
        if replay is None:
            replay = self._steps[key] = self._record(step)
        self._steps.move_to_end(key)
        replay()
        return out[: len(rows.token_N)]

    def _fill(self, rows: DecodeRows) -> _Inputs:
        """The kept memory of a shape, with these rows in it."""
        count, sharing = len(rows.token_N), rows.sharing
        heads = len(sharing.to_row) // count
        width = len(sharing.to_prompt) // (sharing.num_prompts * heads)
        size = round_up(count), _power_of_two(sharing.num_prompts), _power_of_two(width)
        if size not in self._inputs:
            self._inputs[size] = _Inputs(size, heads, self._device)
        self._inputs[size].fill(rows, width)
        return self._inputs[size]


class _Inputs:
    """The rows of a step of one size (rows, prompts, rows that share a prompt), in memory that stays."""

    def __init__(self, size: tuple[int, int, int], heads: int, device: torch.device) -> None:
        self.size = size
        count, num_prompts, width = size

        def kept(length: int) -> torch.Tensor:
            return torch.zeros(length, dtype=torch.int64, device=device)

        unused = kept(0)
        sharing = Sharing(num_prompts, kept(num_prompts * heads * width), kept(count * heads), unused, unused)
        self.rows = DecodeRows(kept(count), kept(count), kept(count), sharing)
        self._source: Sharing | None = None

    def fill(self, rows: DecodeRows, width: int) -> None:
        """Take over a step's rows, of which at most `width` share a prompt."""
        for kept, given in (
            (self.rows.token_N, rows.token_N),
            (self.rows.column_N, rows.column_N),
            (self.rows.prompt_length_N, rows.prompt_length_N),
        ):
            kept[: len(given)].copy_(given)
            kept[len(given) :].zero_()
        if rows.sharing is self._source:
            return
        self._source = rows.sharing
        kept, given, wide = self.rows.sharing, rows.sharing, self.size[2]
        kept.to_prompt.zero_()
        given_PGW = given.to_prompt.view(given.num_prompts, -1, width)
        kept.to_prompt.view(kept.num_prompts, -1, wide)[: given.num_prompts, :, :width] = given_PGW
        moved = given.to_row // width * wide + given.to_row % width
        kept.to_row[: len(moved)].copy_(moved)
        kept.to_row[len(moved) :].zero_()


def check_recordable(shape: ModelShape, model_dir: Path) -> None:
    """UserError unless a step of the model asks nothing of the host that depends on values."""
    if shape.experts is not None:
        raise UserError(
            f"rollout.cuda_graphs needs a dense model: how many tokens pass each expert of {model_dir} is known only "
            "after a step has begun; set it to false"
        )


def round_up(count: int) -> int:
    """Rows of a step that has `count`: few different numbers, and few rows for nothing."""
    if count <= 8:
        return _power_of_two(count)
    step = max(8, 1 << (count.bit_length() - 3))
    return -(-count // step) * step


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
