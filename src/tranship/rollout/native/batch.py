"""The running samples with their keys and values: what the engine prefills and decodes.

A slot is a row of `Slots` (what the sample is) and the same row of the table of responses (what is cached of it).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from tranship.rollout.native.cache import KvTable, PromptRow, Prompts
from tranship.rollout.native.decode_attention import DecodeRows, Sharing
from tranship.rollout.native.finished import FinishedCache
from tranship.rollout.native.kernels import QUERIES, Kernels
from tranship.rollout.native.model import Chunk, Model
from tranship.rollout.native.ranks import Ranks
from tranship.rollout.native.requests import Group, PromptState, Sample
from tranship.rollout.native.sampling import draw, likeliest
from tranship.rollout.native.shape import ModelShape
from tranship.rollout.native.slots import Slots
from tranship.rollout.native.stop_strings import Decode, text_ended
from tranship.types import Response, SampleId

PREFILL_TOKENS = 2048
"""Chunks are packed into one prefill until they have so many tokens; a longer one runs in parts of so many."""


# Of a chunk: the final hidden state of its last token [H], and what the cache keeps, for each layer [sides, G, L, D].
_Prefilled = tuple[torch.Tensor, list[torch.Tensor]]


class Batch:
    """Samples in slots. In deterministic mode prompts are prefilled alone, not shared, and partial responses replayed
    token by token, so that no product's shape depends on the neighbours or on the sample's own history.

    shape: of what lies here; ranks: those that have the rest, and the same samples in the same slots. fixed_step: see
    `num_columns`."""

    def __init__(
        self,
        shape: ModelShape,
        model: Model,
        *,
        num_slots: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        deterministic: bool,
        recompute: bool,
        kernels: Kernels | None,
        decode: Decode | None = None,
        ranks: Ranks | None = None,
        fixed_step: int | None = None,
    ) -> None:
        compiled = kernels is not None
        self._kernels = kernels
        self._rows_together = max(1, QUERIES // shape.heads_per_kv)
        self._num_kv_heads = shape.num_kv_heads
        self._model = model
        self._device = device
        self._deterministic = deterministic
        self._recompute = recompute
        self._decode = decode
        self._ranks = ranks
        self._prompts = Prompts(KvTable(shape, dtype, device, fixed_step=fixed_step, compiled=compiled))
        self._finished = FinishedCache(num_slots)
        self._responses = KvTable(shape, dtype, device, fixed_step=fixed_step, compiled=compiled)
        self._sharing: Sharing | None = None
        self._broken: list[SampleId] = []
        self.slots = Slots(num_slots, max_tokens)

    @property
    def num_free(self) -> int:
        """Free slots."""
        return self.slots.num_slots - self.slots.count

    def free(self) -> None:
        """Drop the cache (no sample may be running)."""
        self._finished.clear()
        self._prompts.free()
        self._responses.free()

    def add(self, group: Group, sample: Sample) -> None:
        """Give a sample a slot; its prompt is prefilled at the next `prefill`."""
        self.slots.add(group, sample)

    def abort(self, names: set[SampleId]) -> list[Response]:
        """Stop those of the samples that run; returns what they have."""
        stopped = []
        for slot in reversed(range(self.slots.count)):
            if self.slots.names[slot] in names:
                stopped.append(self.slots.response(slot, "abort"))
                self._release(slot)
        return stopped

    def update(self) -> None:
        """The weights are others: forget what was computed of finished samples and, unless it is to be left, of running
        ones, which compute it again."""
        self._finished.clear()
        if not self._recompute:
            return
        for slot in range(self.slots.count):
            self._hold_prompt(slot, None)

    def prefill(self, policy_version: int) -> np.ndarray:
        """Compute the prompts and partial responses that running samples lack; returns the slots that got their
        first token."""
        slots = self.slots
        lacking = np.array([slot for slot, prompt in enumerate(slots.prompts) if prompt is None], np.int64)
        if not len(lacking):
            return lacking
        self._responses.fit(slots.count, slots.count, int(slots.length[: slots.count].max()) + 1)
        self._prefill_prompts([slots.groups[slot] for slot in lacking])
        for slot in lacking:
            prompt = slots.groups[slot].prompt
            assert prompt is not None, "the prompt was not prefilled"
            self._hold_prompt(int(slot), prompt.row)
        fresh = self._draw_first(lacking[slots.length[lacking] == 0], policy_version)
        partial = lacking[slots.length[lacking] > 1]
        if len(partial) and not self._deterministic:
            self._prefill_partials(partial)
        for slot in lacking:
            if not slots.groups[slot].waiting:
                self.forget_prompt(slots.groups[slot])
        return fresh

    def _prefill_prompts(self, groups: Sequence[Group]) -> None:
        """Fill in the prompt state of these groups where it is missing."""
        missing = list({id(group): group for group in groups if group.prompt is None}.values())
        chunks = [self._finished.take(group.prompt_ids) for group in missing]
        for batch, made in self._prefill(chunks, 1 if self._deterministic else PREFILL_TOKENS):
            logits = self._model.logits(torch.stack([hidden_H for hidden_H, _ in made]))
            for index, (_, new), row in zip(batch, made, logits, strict=True):
                past = chunks[index].past
                stored = self._prompts.add(new if past is None else _joined(past, new))
                missing[index].prompt = PromptState(stored, row)

    def _prefill(self, chunks: Sequence[Chunk], limit: int) -> Iterator[tuple[list[int], list[_Prefilled]]]:
        """Compute chunks, as many at once as have `limit` tokens together: their indices, and what was made of them. A
        chunk that is too long runs in parts."""
        for batch in _batches([len(chunk.token_ids) for chunk in chunks], limit):
            together = [chunks[index] for index in batch]
            if len(together[0].token_ids) > PREFILL_TOKENS:
                yield batch, [self._prefill_in_parts(together[0])]
            else:
                yield batch, self._prefill_at_once(together)

    def _prefill_at_once(self, chunks: Sequence[Chunk]) -> list[_Prefilled]:
        hidden_NH, kept = self._model.prefill(chunks)
        made = []
        at = 0
        for chunk in chunks:
            tokens = slice(at, at + len(chunk.token_ids))
            layers = [_by_head(layer[tokens], self._num_kv_heads) for layer in kept]
            made.append((hidden_NH[tokens.stop - 1], layers))
            at = tokens.stop
        return made

    def _prefill_in_parts(self, chunk: Chunk) -> _Prefilled:
        hidden_H, kept, past = torch.empty(0), [], chunk.past
        for start in range(0, len(chunk.token_ids), PREFILL_TOKENS):
            part = Chunk(chunk.token_ids[start : start + PREFILL_TOKENS], chunk.start + start, past)
            ((hidden_H, new),) = self._prefill_at_once([part])
            kept = _joined(kept, new) if kept else new
            past = _joined(chunk.past, kept) if chunk.past is not None else kept
        return hidden_H, kept

    def _hold_prompt(self, slot: int, row: PromptRow | None) -> None:
        """Give a slot its prompt, or none, with nothing of its response in the cache.

        In deterministic mode every slot has a copy of its own, so that no product's shape depends on how many share.
        """
        held = self.slots.prompts[slot]
        if held is not None:
            self._prompts.release(held)
        if row is not None and self._deterministic:
            row = self._prompts.add(self._prompts.read(row))
        elif row is not None:
            row.holders += 1
        if row is not None:
            self._responses.clear(slot)
        self.slots.prompts[slot] = row
        self.slots.cached[slot] = 0
        self._sharing = None

    def forget_prompt(self, group: Group) -> None:
        """Drop a group's prefilled prompt; samples that run keep theirs."""
        if group.prompt is not None:
            self._prompts.release(group.prompt.row)
            group.prompt = None
            self._sharing = None

    def _draw_first(self, rows: np.ndarray, policy_version: int) -> np.ndarray:
        """Draw the first token of these slots from their prompts' logits; returns those that got one."""
        if not len(rows):
            return rows
        slots = self.slots
        prompts = [slots.groups[slot].prompt for slot in rows]
        logits = torch.stack([prompt.logits for prompt in prompts if prompt is not None])
        return self._append(rows, logits, policy_version)

    def _prefill_partials(self, rows: np.ndarray) -> None:
        """Fill the cache of interrupted samples, up to the token before their last."""
        slots = self.slots
        chunks = []
        for slot in rows:
            prompt = slots.prompts[slot]
            assert prompt is not None, "the prompt was not prefilled"
            tokens = slots.tokens[slot, : slots.length[slot] - 1]
            chunks.append(Chunk(tokens, prompt.length, self._prompts.read(prompt)))
        for batch, made in self._prefill(chunks, PREFILL_TOKENS):
            for index, (_, kept) in zip(batch, made, strict=True):
                slot = int(rows[index])
                for layer, kv in enumerate(kept):
                    self._responses.write(layer, slot, kv)
                slots.cached[slot] = len(chunks[index].token_ids)

    def decode(self, policy_version: int) -> np.ndarray:
        """Run one token of every slot; returns the slots that got a new one (the others replay what they had)."""
        slots = self.slots
        rows = np.arange(slots.count)
        if not len(rows):
            return rows
        self._responses.fit(slots.count, slots.count, int(slots.cached[rows].max()) + 1)
        logits = self._model.decode(self._decode_rows(rows), self._prompts.table, self._responses)
        slots.cached[rows] += 1
        grown = rows[slots.cached[rows] == slots.length[rows]]
        if not len(grown):
            return grown
        if len(grown) < len(rows):
            logits = logits[self._tensor(grown)]
        return self._append(grown, logits, policy_version)

    def _draw(self, logits: torch.Tensor, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The next tokens of these slots and their log-probs. Of several ranks the first draws for all."""
        if self._ranks is None:
            return draw(logits, self.slots.sampling(rows), self._kernels)
        if self._ranks.share.rank:
            return self._ranks.agree(None, len(rows))
        return self._ranks.agree(draw(logits, self.slots.sampling(rows), self._kernels), len(rows))

    def _decode_rows(self, rows: np.ndarray) -> DecodeRows:
        slots = self.slots
        if self._sharing is None:
            maps = slots.sharing(self._prompts.count, self._num_kv_heads, self._rows_together)
            self._sharing = Sharing(self._prompts.count, *map(self._tensor, maps))
        tokens = slots.tokens[rows, slots.cached[rows]].astype(np.int64)
        return DecodeRows(
            self._tensor(tokens),
            self._tensor(slots.cached[rows]),
            self._tensor(slots.prompt_length[rows]),
            self._sharing,
        )

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def _append(self, rows: np.ndarray, logits_NV: torch.Tensor, policy_version: int) -> np.ndarray:
        """Add one token to each of these slots; returns them without those that are broken (not finite)."""
        tokens, logprobs = self._draw(logits_NV, rows)
        good = np.isfinite(logprobs)
        self._broken += [self.slots.names[slot] for slot in rows[~good]]
        self.slots.append(rows[good], tokens[good], logprobs[good], policy_version)
        for place in np.flatnonzero(good & (self.slots.num_top[rows] > 0)):
            slot = rows[place]
            temperature, count = float(self.slots.temperature[slot]), int(self.slots.num_top[slot])
            self.slots.tops[slot].append(likeliest(logits_NV[place], temperature, count))
        self._look_for_strings(rows[good])
        return rows[good]

    def _look_for_strings(self, rows: np.ndarray) -> None:
        slots = self.slots
        for slot in rows[slots.has_strings[rows]]:
            assert self._decode is not None, "stop strings without a tokenizer"
            made = slots.tokens[slot, : slots.length[slot]]
            slots.text_ended[slot] = text_ended(made, slots.groups[slot].stop_strings, self._decode)

    def drop_broken(self) -> list[SampleId]:
        """Forget the samples whose logits were not finite; returns their names."""
        broken, self._broken = self._broken, []
        for name in broken:
            self._release(self.slots.names.index(name))
        return broken

    def collect(self, rows: np.ndarray) -> list[Response]:
        """The responses of those of these slots that have ended; their slots become free."""
        finished = []
        for slot in reversed(self.slots.ended(rows)):
            self._keep(int(slot))
            finished.append(self.slots.response(slot, self.slots.reason(slot)))
            self._release(int(slot))
        return finished

    def _keep(self, slot: int) -> None:
        """Keep the keys and values of a sample that another request goes on after, if they are all of one version's
        weights. In deterministic mode none are: a prompt that is prefilled in parts differs in its last bits."""
        slots, prompt = self.slots, self.slots.prompts[slot]
        cached = int(slots.cached[slot])
        if self._deterministic or prompt is None or not slots.groups[slot].goes_on or self._mixed(slot):
            return
        response = [self._responses.row(layer, slot, cached) for layer in range(self._responses.num_layers)]
        token_ids = np.concatenate([slots.groups[slot].prompt_ids, slots.tokens[slot, :cached]])
        self._finished.add(token_ids, _joined(self._prompts.read(prompt), response))

    def _mixed(self, slot: int) -> bool:
        """Whether a cache that updates leave as it is holds keys and values of several versions."""
        versions = self.slots.versions[slot, : self.slots.length[slot]]
        return not self._recompute and versions.min() != versions.max()

    def _release(self, slot: int) -> None:
        self._hold_prompt(slot, None)
        moved = self.slots.remove(slot)
        if moved != slot:
            self._responses.copy_row(moved, slot)


def _joined(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """For each layer [sides, G, L, D]: the tokens of both."""
    return [torch.cat(pair, 2) for pair in zip(first, second, strict=True)]


def _by_head(kv_LSD: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[sides, G, L, D] of what the cache keeps, given token by token."""
    return kv_LSD.unflatten(1, (-1, num_heads)).permute(1, 2, 0, 3)


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
