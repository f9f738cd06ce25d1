"""Decode steps that a device does again without being told: recorded once as a graph, then replayed.

On a GPU the host takes longer to ask for the hundreds of small operations of a step than the device takes to do them. A
graph has fixed shapes and addresses, so rows, prompts and columns are rounded up, and what a step reads of the host's
lies in kept memory. Rows that stand for nothing read token 0 of no prompt, in slots that no sample has.

Letters: N rows, P prompts, G key heads, W the most rows that share a prompt, V vocabulary.
"""

from __future__ import annotations

import logging
import weakref
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

MAX_GRAPHS = 64
MAX_SEEN = 1024
_log = logging.getLogger(__name__)


class CudaRecorder:
    """Records CUDA graphs. Those that are alive share their memory: what one leaves is read before another one runs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._alive: weakref.WeakSet[Any] = weakref.WeakSet()
        self._stream: Any = None
        self._pool: Any = None

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        with torch.cuda.device(self._device):
            if self._stream is None:
                # What libraries keep for a stream is made outside of the graphs' memory, which comes and goes.
                self._stream = torch.cuda.Stream()
                self._stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self._stream):
                    run()
                torch.cuda.current_stream().wait_stream(self._stream)
            if not self._alive:
                # The memory of graphs of which none is left cannot be taken again.
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            # Other threads of this process may ask for memory meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                run()
        self._alive.add(graph)
        return graph.replay


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
        self._record: Record | None = record
        self._device = device
        self._size = round_up(max_rows), vocab
        self._logits: torch.Tensor | None = None
        self._inputs: dict[tuple[int, int, int], _Inputs] = {}
        self._seen: OrderedDict[Any, None] = OrderedDict()
        self._graphs: OrderedDict[Any, Callable[[], None]] = OrderedDict()

    def clear(self) -> None:
        """Drop all graphs and what they read."""
        self._seen.clear()
        self._graphs.clear()
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
        graph = self._graph(key, step)
        (step if graph is None else graph)()
        return out[: len(rows.token_N)]

    def _graph(self, key: Any, step: Callable[[], None]) -> Callable[[], None] | None:
        """The graph of a shape; None if it is there for the first time: one that never comes back is not worth it, and
        a step has to have run before it is recorded. If the device cannot record a step, none is from then on."""
        if key in self._graphs:
            self._graphs.move_to_end(key)
            return self._graphs[key]
        if self._record is None:
            return None
        if key not in self._seen:
            self._seen[key] = None
            if len(self._seen) > MAX_SEEN:
                self._seen.popitem(last=False)
            return None
        if len(self._graphs) == MAX_GRAPHS:
            self._graphs.popitem(last=False)
        try:
            self._graphs[key] = self._record(step)
        except RuntimeError as error:
            _log.warning("decode steps run without graphs from now on, slower: one could not be recorded: %s", error)
            self._record = None
            self._graphs.clear()
            return None
        return self._graphs[key]

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
