"""The native rollout engine: continuous batching over slots, one process, one device.

Each step admits what waits, prefills what needs it, and decodes one token of every running sample. A prompt is
prefilled once for its group, stored once, and read once for all samples of the group that run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from tranship.layouts.pieces import Piece
from tranship.rollout.engine import Capabilities, GroupRequest
from tranship.rollout.native.cache import KvTable, PromptRow, Prompts
from tranship.rollout.native.model import FIXED_COLUMNS, Chunk, DecodeRows, Model
from tranship.rollout.native.requests import Group, PromptState, make_group
from tranship.rollout.native.sampling import draw
from tranship.rollout.native.shape import read_shape
from tranship.rollout.native.slots import Slots
from tranship.rollout.native.weights import Weights
from tranship.types import Response, RunError, SampleId, UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PREFILL_TOKENS = 2048
"""Chunks are packed into one prefill until they have so many tokens (a longer chunk runs alone)."""
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
    """Llama, Qwen2 and Qwen3 on one device. See `RolloutEngine` for what each method promises.

    model_dir: a Hugging Face folder, of which only config.json is read: weights come in through `pieces` and
    `storage`. max_tokens: the longest prompt and response together. on_update: "recompute" computes the cache of
    unfinished responses again with new weights, "keep" leaves it. deterministic: see `Capabilities`; an interrupted
    response is then replayed token by token, so that it goes on as if it had never stopped. ignore_eos: every
    response runs to its cap.
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
    ) -> None:
        self._device = torch.device(device)
        if deterministic:
            _check_deterministic(dtype, self._device)
        self._shape = read_shape(Path(model_dir), max_tokens)
        self._max_tokens = max_tokens
        self._recompute = on_update == "recompute"
        self._eos_token_ids = eos_token_ids
        self._ignore_eos = ignore_eos
        self._deterministic = deterministic
        self.capabilities = Capabilities(deterministic=deterministic, partial_rollout=True)
        self._weights = Weights(self._shape, DTYPES[dtype], self._device)
        self._model = Model(self._shape, self._device, max_tokens, fixed_columns=deterministic)
        step = FIXED_COLUMNS if deterministic else None
        self._prompts = Prompts(KvTable(self._shape, DTYPES[dtype], self._device, step))
        self._responses = KvTable(self._shape, DTYPES[dtype], self._device, step)
        self._sharing: tuple[torch.Tensor, torch.Tensor] | None = None
        self._slots = Slots(max_running, max_tokens)
        self._queue: deque[Group] = deque()
        self._ended: list[Response] = []
        self._broken: list[SampleId] = []
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
        return max(0, self._slots.num_slots - self._slots.count - waiting)

    def submit(self, request: GroupRequest) -> None:
        ends = () if self._ignore_eos else (*self._eos_token_ids, *request.sampling.stop_token_ids)
        group, ended = make_group(request, vocab=self._shape.vocab, max_tokens=self._max_tokens, end_ids=ends)
        twice = self._names.intersection(request.samples)
        if twice:
            raise UserError(f"{min(twice)} is running already: abort it first, or give another attempt number")
        self._names.update(request.samples)
        self._ended += ended
        if group.waiting:
            self._queue.append(group)

    @_exact_inference()
    def step(self) -> list[Response]:
        """See `RolloutEngine.step`. Raises RunError naming samples whose logits are not finite; they are dropped, and
        the next step goes on with the others (and returns what finished in this one)."""
        assert not self._updating, "a step between begin_update and finish_update"
        finished, self._ended = self._ended, []
        failed: list[SampleId] = []
        if self._slots.count or self._queue:
            self._need_weights()
            self._admit()
            for work in (self._prefill, self._decode):
                finished += self._collect(work())
                failed += self._drop_broken()
        if failed:
            self._ended = finished
            raise _not_finite(failed, self._policy_version)
        self._names.difference_update(response.sample for response in finished)
        return finished

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
                self._forget_prompt(group)
        self._queue = deque(group for group in self._queue if group.waiting)
        for slot in reversed(range(self._slots.count)):
            if self._slots.names[slot] in wanted:
                stopped.append(self._slots.response(slot, "abort"))
                self._release(slot)
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
            self._forget_prompt(group)
        if self._recompute:
            for slot in range(self._slots.count):
                self._hold_prompt(slot, None)
        self._policy_version = policy_version
        self._updating = False

    @_exact_inference()
    def probe(self, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        self._need_weights()
        hidden, _ = self._model.prefill([Chunk(np.asarray(token_ids, np.int32))])
        targets = torch.from_numpy(np.asarray(token_ids[1:], np.int64)).to(self._device)[:, None]
        parts = [np.empty(0, np.float32)]
        for start in range(0, len(targets), PROBE_ROWS):
            rows = slice(start, min(start + PROBE_ROWS, len(targets)))
            logprobs = torch.log_softmax(self._model.logits(hidden[rows]).float() / temperature, -1)
            parts.append(logprobs.gather(1, targets[rows]).squeeze(1).cpu().numpy())
        return np.concatenate(parts)

    def sleep(self) -> None:
        assert not self._names, f"{len(self._names)} samples are unfinished: abort them before sleep"
        self._weights.free()
        self._model.free()
        self._prompts.free()
        self._responses.free()
        self._policy_version = -1

    def wake_up(self) -> None:
        self._weights.allocate()

    def _need_weights(self) -> None:
        if self._policy_version < 0:
            raise RunError("the rollout engine has no weights yet: it needs an update before it can sample")

    def _admit(self) -> None:
        """Move waiting samples, in order of arrival, to free slots."""
        while self._queue and self._slots.count < self._slots.num_slots:
            group = self._queue[0]
            self._slots.add(group, group.waiting.popleft())
            if not group.waiting:
                self._queue.popleft()

    def _prefill(self) -> np.ndarray:
        """Compute the prompts and partial responses that running samples lack; returns the slots that got their
        first token."""
        slots = self._slots
        lacking = np.array([slot for slot, prompt in enumerate(slots.prompts) if prompt is None], np.int64)
        if not len(lacking):
            return lacking
        self._prefill_prompts([slots.groups[slot] for slot in lacking])
        for slot in lacking:
            prompt = slots.groups[slot].prompt
            assert prompt is not None, "the prompt was not prefilled"
            self._hold_prompt(int(slot), prompt.row)
        fresh = self._draw_first(lacking[slots.length[lacking] == 0])
        partial = lacking[slots.length[lacking] > 1]
        if len(partial) and not self._deterministic:
            self._prefill_partials(partial)
        for slot in lacking:
            if not slots.groups[slot].waiting:
                self._forget_prompt(slots.groups[slot])
        return fresh

    def _prefill_prompts(self, groups: Sequence[Group]) -> None:
        """Fill in the prompt state of these groups where it is missing."""
        missing = list({id(group): group for group in groups if group.prompt is None}.values())
        limit = 1 if self._deterministic else PREFILL_TOKENS
        for batch in _batches([len(group.prompt_ids) for group in missing], limit):
            chosen = [missing[index] for index in batch]
            hidden, kept = self._model.prefill([Chunk(group.prompt_ids) for group in chosen])
            stops = np.cumsum([len(group.prompt_ids) for group in chosen])
            logits = self._model.logits(hidden[self._tensor(stops - 1)])
            for row, (group, stop) in enumerate(zip(chosen, stops, strict=True)):
                tokens = slice(int(stop) - len(group.prompt_ids), int(stop))
                stored = self._prompts.add([_by_head(layer[tokens]) for layer in kept])
                group.prompt = PromptState(stored, logits[row])

    def _hold_prompt(self, slot: int, row: PromptRow | None) -> None:
        """Give a slot its prompt, or none, with nothing of its response in the cache.

        In deterministic mode every slot has a copy of its own, so that no product's shape depends on how many share.
        """
        held = self._slots.prompts[slot]
        if held is not None:
            self._prompts.release(held)
        if row is not None and self._deterministic:
            row = self._prompts.add(self._prompts.read(row))
        elif row is not None:
            row.holders += 1
        if row is not None:
            self._responses.clear(slot)
        self._slots.prompts[slot] = row
        self._slots.cached[slot] = 0
        self._sharing = None

    def _forget_prompt(self, group: Group) -> None:
        if group.prompt is not None:
            self._prompts.release(group.prompt.row)
            group.prompt = None
            self._sharing = None

    def _draw_first(self, rows: np.ndarray) -> np.ndarray:
        """Draw the first token of these slots from their prompts' logits; returns those that got one."""
        if not len(rows):
            return rows
        slots = self._slots
        prompts = [slots.groups[slot].prompt for slot in rows]
        logits = torch.stack([prompt.logits for prompt in prompts if prompt is not None])
        return self._append(rows, *draw(logits, slots.sampling(rows)))

    def _prefill_partials(self, rows: np.ndarray) -> None:
        """Fill the cache of interrupted samples, up to the token before their last."""
        slots = self._slots
        sizes = slots.length[rows] - 1
        self._responses.fit(slots.count, slots.num_slots, int(max(slots.length[: slots.count].max(), 1)))
        for batch in _batches(sizes.tolist(), PREFILL_TOKENS):
            chosen = [int(rows[index]) for index in batch]
            chunks = []
            for slot in chosen:
                prompt = slots.prompts[slot]
                assert prompt is not None, "the prompt was not prefilled"
                tokens = slots.tokens[slot, : slots.length[slot] - 1]
                chunks.append(Chunk(tokens, prompt.length, self._prompts.read(prompt)))
            _, kept = self._model.prefill(chunks)
            at = 0
            for slot, chunk in zip(chosen, chunks, strict=True):
                tokens = slice(at, at + len(chunk.token_ids))
                for layer, kv in enumerate(kept):
                    self._responses.write(layer, slot, _by_head(kv[tokens]))
                slots.cached[slot] = len(chunk.token_ids)
                at = tokens.stop

    def _decode(self) -> np.ndarray:
        """Run one token of every slot; returns the slots that got a new one (the others replay what they had)."""
        slots = self._slots
        rows = np.arange(slots.count)
        if not len(rows):
            return rows
        self._responses.fit(slots.count, slots.num_slots, int(slots.cached[rows].max()) + 1)
        logits = self._model.decode(self._decode_rows(rows), self._prompts.table, self._responses)
        slots.cached[rows] += 1
        grown = rows[slots.cached[rows] == slots.length[rows]]
        if not len(grown):
            return grown
        if len(grown) < len(rows):
            logits = logits[self._tensor(grown)]
        return self._append(grown, *draw(logits, slots.sampling(grown)))

    def _decode_rows(self, rows: np.ndarray) -> DecodeRows:
        slots = self._slots
        if self._sharing is None:
            to_prompt, to_row = slots.sharing(self._prompts.count, self._shape.num_kv_heads)
            self._sharing = self._tensor(to_prompt), self._tensor(to_row)
        tokens = slots.tokens[rows, slots.cached[rows]].astype(np.int64)
        return DecodeRows(
            self._tensor(tokens),
            self._tensor(slots.cached[rows]),
            self._tensor(slots.prompt_length[rows]),
            self._prompts.count,
            *self._sharing,
        )

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def _append(self, rows: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
        """Add one token to each of these slots; returns them without those that are broken (not finite)."""
        good = np.isfinite(logprobs)
        self._broken += [self._slots.names[slot] for slot in rows[~good]]
        self._slots.append(rows[good], tokens[good], logprobs[good], self._policy_version)
        return rows[good]

    def _drop_broken(self) -> list[SampleId]:
        """Forget the broken samples; returns their names."""
        broken, self._broken = self._broken, []
        for name in broken:
            self._release(self._slots.names.index(name))
        self._names.difference_update(broken)
        return broken

    def _collect(self, rows: np.ndarray) -> list[Response]:
        """The responses of those of these slots that have ended; their slots become free."""
        finished = []
        for slot in reversed(self._slots.ended(rows)):
            finished.append(self._slots.response(slot, self._slots.reason(slot)))
            self._release(int(slot))
        return finished

    def _release(self, slot: int) -> None:
        self._hold_prompt(slot, None)
        moved = self._slots.remove(slot)
        if moved != slot and self._responses.rows:
            self._responses.copy_row(moved, slot)


def _check_deterministic(dtype: str, device: torch.device) -> None:
    threads = torch.get_num_threads()
    if dtype != "fp32" or device.type != "cpu" or threads != 1:
        raise UserError(
            f"the deterministic mode of the native engine needs dtype fp32, device cpu and 1 thread, not {dtype}, "
            f"{device} and {threads}: set rollout.dtype=fp32, placement.device=cpu, placement.threads_per_process=1"
        )


def _by_head(kv_L2GD: torch.Tensor) -> torch.Tensor:
    """[2, G, L, D] of keys and values that lie token by token."""
    return kv_L2GD.unflatten(1, (2, -1)).permute(1, 2, 0, 3)


def _not_finite(names: Sequence[SampleId], version: int) -> RunError:
    shown = ", ".join(str(tuple(name)) for name in names[:4]) + (" ..." if len(names) > 4 else "")
    return RunError(
        f"logits are not finite at policy version {version} for {len(names)} samples "
        f"(group, sample, attempt): {shown}: check the weights of that version"
    )


def _batches(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Indices in order, cut so that the sizes of a batch add up to at most `limit` (one larger is alone)."""
    batches: list[list[int]] = []
    total = 0
    for index, size in enumerate(sizes):
        if not batches or total + size > limit:
            batches.append([])
            total = 0
        batches[-1].append(index)
        total += size
    return batches
