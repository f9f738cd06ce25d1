"""The native rollout engine: continuous batching over slots, in one process, on one device.

Each step admits what waits, prefills what needs it, and decodes one token of every running sample. A prompt is
prefilled once for its group, stored once, and read once for all samples of the group that run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from tranship.layouts import Piece, Share
from tranship.rollout.engine import Capabilities, GroupRequest, SamplesFailed
from tranship.rollout.native.batch import Batch
from tranship.rollout.native.decode_attention import FIXED_COLUMNS
from tranship.rollout.native.kernels import kernels_for
from tranship.rollout.native.model import Chunk, Model
from tranship.rollout.native.ranks import Ranks
from tranship.rollout.native.recorded import Record, check_recordable
from tranship.rollout.native.requests import Group, make_group
from tranship.rollout.native.shape import read_shape
from tranship.rollout.native.split import split_shape
from tranship.rollout.native.stop_strings import Decode
from tranship.rollout.native.weights import Weights
from tranship.types import Response, RunError, SampleId, UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PROBE_ROWS = 128


@contextmanager
def _exact_inference() -> Iterator[None]:
    """No autograd, and fp32 products in full precision: numbers must not depend on what others set in this process."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.inference_mode():
            yield
    finally:
        torch.set_float32_matmul_precision(before)


class NativeEngine:
    """Every family of `shape.SUPPORTED_FAMILIES` on one device. See `RolloutEngine` for what each method promises.

    model_dir: a Hugging Face folder, of which only config.json is read: weights come in through `pieces` and
    `storage`. max_tokens: the longest prompt and response together. on_update: "recompute" computes the cache of
    unfinished responses again with new weights, "keep" leaves it. deterministic: see `Capabilities`; an interrupted
    response then goes on, to the bit, as if it had never stopped. ignore_eos: every response runs to its cap.
    decode: token ids to text, for stop strings; None: they are refused. ranks: engines of other processes that hold the
    rest of the model; every one of them must be told the same, in the same order (`leader` does so). None: all of the
    model is here. record: of decode steps as graphs (see `recorded`), of dense models; None: none is recorded.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        dtype: Literal["fp32", "bf16"],
        device: str,
        max_running: int,
        max_tokens: int,
        on_update: Literal["recompute", "keep"],
        deterministic: bool,
        eos_token_ids: tuple[int, ...],
        ignore_eos: bool = False,
        decode: Decode | None = None,
        ranks: Ranks | None = None,
        record: Record | None = None,
    ) -> None:
        self._device = torch.device(device)
        if deterministic:
            _check_deterministic(dtype, self._device)
        share = Share() if ranks is None else ranks.share
        whole = read_shape(Path(model_dir), max_tokens)
        if record is not None:
            check_recordable(whole, model_dir)
        self._shape = split_shape(whole, share)
        self._max_tokens = max_tokens
        self._eos_token_ids = eos_token_ids
        self._ignore_eos = ignore_eos
        self._decode = decode
        self.capabilities = Capabilities(deterministic=deterministic, partial_rollout=True)
        # Bits of deterministic mode must not depend on whether there is a compiler.
        kernels = None if deterministic or record is not None else kernels_for(self._device, self._shape.head_dim)
        self._weights = Weights(whole, DTYPES[dtype], self._device, share)
        self._model = Model(
            self._shape,
            self._device,
            DTYPES[dtype],
            max_tokens,
            fixed_columns=deterministic,
            kernels=kernels,
            ranks=ranks,
            record=record,
            max_rows=max_running,
        )
        self._batch = Batch(
            self._shape,
            self._model,
            num_slots=max_running,
            max_tokens=max_tokens,
            dtype=DTYPES[dtype],
            device=self._device,
            deterministic=deterministic,
            recompute=on_update == "recompute",
            kernels=kernels,
            decode=decode,
            ranks=ranks,
            # Shapes of products that are to be equal to the bit, and of graphs, may not follow the lengths.
            fixed_step=FIXED_COLUMNS if deterministic or record is not None else None,
        )
        self._queue: deque[Group] = deque()
        self._ended: list[Response] = []
        self._names: set[SampleId] = set()
        self._policy_version = -1
        self._updating = False

    @property
    def policy_version(self) -> int:
        return self._policy_version

    @property
    def num_unfinished(self) -> int:
        return len(self._names)

    @property
    def num_free(self) -> int:
        waiting = sum(len(group.waiting) for group in self._queue)
        return max(0, self._batch.num_free - waiting)

    def submit(self, request: GroupRequest) -> None:
        ends = () if self._ignore_eos else (*self._eos_token_ids, *request.sampling.stop_token_ids)
        strings = () if self._ignore_eos else request.sampling.stop_strings
        if strings and self._decode is None:
            raise UserError("sampling.stop_strings needs a rollout engine that was given a tokenizer's decode function")
        group, ended = make_group(
            request, vocab=self._shape.vocab, max_tokens=self._max_tokens, end_ids=ends, stop_strings=strings
        )
        twice = self._names.intersection(request.samples)
        if twice:
            raise UserError(f"{min(twice)} is running already: abort it first, or give another attempt number")
        self._names.update(request.samples)
        self._ended += ended
        if group.waiting:
            self._queue.append(group)

    @_exact_inference()
    def step(self) -> list[Response]:
        """See `RolloutEngine.step`."""
        assert not self._updating, "a step between begin_update and finish_update"
        failed: list[SampleId] = []
        if self._batch.slots.count or self._queue:
            self._need_weights()
            self._admit()
            for work in (self._batch.prefill, self._batch.decode):
                self._ended += self._batch.collect(work(self._policy_version))
                failed += self._batch.drop_broken()
        if failed:
            self._names.difference_update(failed)
            raise _not_finite(failed, self._policy_version)
        finished, self._ended = self._ended, []
        self._names.difference_update(response.sample for response in finished)
        return finished

    def peek(self, starts: Mapping[SampleId, int]) -> list[Response]:
        return self._batch.slots.beyond(starts)

    @torch.inference_mode()
    def abort(self, samples: Sequence[SampleId] | None = None) -> list[Response]:
        """See `RolloutEngine.abort`. Samples that are not unfinished are passed over."""
        wanted = set(self._names) if samples is None else self._names.intersection(samples)
        stopped = [response for response in self._ended if response.sample in wanted]
        self._ended = [response for response in self._ended if response.sample not in wanted]
        for group in self._queue:
            stopped += [sample.response("abort") for sample in group.waiting if sample.sample in wanted]
            group.waiting = deque(sample for sample in group.waiting if sample.sample not in wanted)
            if not group.waiting:
                self._batch.forget_prompt(group)
        self._queue = deque(group for group in self._queue if group.waiting)
        stopped += self._batch.abort(wanted)
        self._names -= wanted
        return stopped

    def pieces(self) -> list[Piece]:
        return self._weights.pieces()

    def storage(self, name: str) -> torch.Tensor:
        return self._weights[name]

    def begin_update(self) -> None:
        assert not self._updating, "begin_update twice"
        self._updating = True

    @_exact_inference()
    def finish_update(self, policy_version: int) -> None:
        """See `RolloutEngine.finish_update`. The cache is computed again by the next step, not here."""
        assert self._updating, "finish_update without begin_update"
        self._model.prepare(self._weights)
        for group in self._queue:
            self._batch.forget_prompt(group)
        self._batch.update()
        self._policy_version = policy_version
        self._updating = False

    @_exact_inference()
    def probe(self, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """See `RolloutEngine.probe`; temperature 0 reports temperature 1, as sampling does."""
        self._need_weights()
        hidden, _ = self._model.prefill([Chunk(np.asarray(token_ids, np.int32))])
        targets = torch.from_numpy(np.asarray(token_ids[1:], np.int64)).to(self._device)[:, None]
        parts = [np.empty(0, np.float32)]
        for start in range(0, len(targets), PROBE_ROWS):
            rows = slice(start, min(start + PROBE_ROWS, len(targets)))
            logprobs = torch.log_softmax(self._model.logits(hidden[rows]).float() / (temperature or 1.0), -1)
            parts.append(logprobs.gather(1, targets[rows]).squeeze(1).cpu().numpy())
        return np.concatenate(parts)

    def sleep(self) -> None:
        assert not self._names, f"{len(self._names)} samples are unfinished: abort them before sleep"
        self._weights.free()
        self._model.free()
        self._batch.free()
        self._policy_version = -1

    def wake_up(self) -> None:
        self._weights.allocate()

    def _need_weights(self) -> None:
        if self._policy_version < 0:
            raise RunError("the rollout engine has no weights yet: it needs an update before it can sample")

    def _admit(self) -> None:
        """Move waiting samples, in order of arrival, to free slots."""
        while self._queue and self._batch.num_free:
            group = self._queue[0]
            self._batch.add(group, group.waiting.popleft())
            if not group.waiting:
                self._queue.popleft()


def _check_deterministic(dtype: str, device: torch.device) -> None:
    threads = torch.get_num_threads()
    if dtype != "fp32" or device.type != "cpu" or threads != 1:
        raise UserError(
            f"the deterministic mode of the native engine needs dtype fp32, device cpu and 1 thread, not {dtype}, "
            f"{device} and {threads}: set rollout.dtype=fp32, placement.device=cpu, placement.threads_per_process=1"
        )


def _not_finite(names: Sequence[SampleId], version: int) -> SamplesFailed:
    shown = ", ".join(str(tuple(name)) for name in names[:4]) + (" ..." if len(names) > 4 else "")
    return SamplesFailed(
        f"logits are not finite at policy version {version} for {len(names)} samples "
        f"(group, sample, attempt): {shown}: check the weights of that version",
        names,
    )
