"""The running samples, one slot each, as arrays: slots 0..count-1 are taken, in no particular order."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tranship.rollout.native.cache import PromptRow
from tranship.rollout.native.requests import Group, Sample
from tranship.rollout.native.sampling import RowSampling, join_likeliest
from tranship.types import FinishReason, Response, SampleId, TopLogprobs


class Slots:
    """What each running sample has: its tokens and how it is drawn.

    prompts: where its prompt's keys and values lie, None where they are to be computed. length: tokens of the
    response so far. cached: how many of them have keys and values; the token that decoding reads next is
    tokens[slot, cached]. has_strings: whether its text may end it, text_ended: whether it has. num_top: how many
    of the likeliest tokens are told; tops: they, place by place.
    """

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        self.num_slots = num_slots
        self.count = 0
        self.groups: list[Group] = []
        self.names: list[SampleId] = []
        self.prompts: list[PromptRow | None] = []
        self.tops: list[list[TopLogprobs]] = []
        self.prompt_length = np.zeros(num_slots, np.int64)
        self.cap = np.zeros(num_slots, np.int64)
        self.length = np.zeros(num_slots, np.int64)
        self.cached = np.zeros(num_slots, np.int64)
        self.seed = np.zeros(num_slots, np.uint64)
        self.temperature = np.zeros(num_slots)
        self.top_k = np.zeros(num_slots, np.int64)
        self.top_p = np.zeros(num_slots)
        self.min_p = np.zeros(num_slots)
        self.num_top = np.zeros(num_slots, np.int64)
        self.has_strings = np.zeros(num_slots, bool)
        self.text_ended = np.zeros(num_slots, bool)
        self.end_ids = np.full((num_slots, 1), -1, np.int64)
        self.tokens = np.zeros((num_slots, max_tokens), np.int32)
        self.logprobs = np.zeros((num_slots, max_tokens), np.float32)
        self.versions = np.zeros((num_slots, max_tokens), np.int32)

    def add(self, group: Group, sample: Sample) -> int:
        """Give a sample the next slot; returns it."""
        slot, sampling, length = self.count, group.sampling, len(sample.tokens)
        assert slot < self.num_slots, "no slot is free"
        self.count += 1
        self.groups.append(group)
        self.prompts.append(None)
        self.names.append(sample.sample)
        self.tops.append([] if sample.top is None else [sample.top])
        self.prompt_length[slot] = len(group.prompt_ids)
        self.cap[slot] = sampling.max_response_tokens
        self.length[slot] = length
        self.cached[slot] = 0
        self.seed[slot] = sample.seed & 0xFFFFFFFFFFFFFFFF
        self.temperature[slot] = sampling.temperature
        self.top_k[slot], self.top_p[slot], self.min_p[slot] = sampling.top_k, sampling.top_p, sampling.min_p
        self.has_strings[slot], self.text_ended[slot] = bool(group.stop_strings), False
        self.num_top[slot] = sampling.top_logprobs
        self._set_ends(slot, group.end_ids)
        self.tokens[slot, :length] = sample.tokens
        self.logprobs[slot, :length] = sample.logprobs
        self.versions[slot, :length] = sample.versions
        return slot

    def _set_ends(self, slot: int, end_ids: tuple[int, ...]) -> None:
        missing = len(end_ids) - self.end_ids.shape[1]
        if missing > 0:
            self.end_ids = np.pad(self.end_ids, ((0, 0), (0, missing)), constant_values=-1)
        self.end_ids[slot] = -1
        self.end_ids[slot, : len(end_ids)] = end_ids

    def sharing(self, num_prompts: int, num_heads: int, together: int) -> tuple[np.ndarray, ...]:
        """to_prompt, to_row, order and units of `Sharing`, int64; units of up to `together` rows. Every prompt must be
        known."""
        where = np.array([prompt.index for prompt in self.prompts if prompt is not None])
        order = np.argsort(where, kind="stable")
        starts = np.searchsorted(where[order], np.arange(num_prompts))
        place = np.empty(self.count, np.int64)
        place[order] = np.arange(self.count) - starts[where[order]]
        width, heads = place.max() + 1, np.arange(num_heads)
        to_row = (where[:, None] * num_heads + heads) * width + place[:, None]
        to_prompt = np.zeros(num_prompts * num_heads * width, np.int64)
        to_prompt[to_row] = np.arange(self.count)[:, None] * num_heads + heads
        ends = np.append(starts[1:], self.count)
        units = [
            (prompt, first, min(together, end - first))
            for prompt, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True))
            for first in range(start, end, together)
        ]
        return to_prompt, to_row.ravel(), order, np.array(units, np.int64)

    def sampling(self, rows: np.ndarray) -> RowSampling:
        """How the next token of each of these slots is drawn."""
        return RowSampling(
            self.seed[rows],
            self.length[rows],
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
        )

    def append(self, rows: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray, version: int) -> None:
        """Add one token to each of these slots."""
        at = self.length[rows]
        self.tokens[rows, at], self.logprobs[rows, at], self.versions[rows, at] = tokens, logprobs, version
        self.length[rows] = at + 1

    def ended(self, rows: np.ndarray) -> np.ndarray:
        """Those of these slots (with at least one token) whose last token or text is an end, or that reached their
        cap."""
        return rows[self._at_end(rows) | self.text_ended[rows] | (self.length[rows] >= self.cap[rows])]

    def _at_end(self, rows: np.ndarray) -> np.ndarray:
        last = self.tokens[rows, self.length[rows] - 1]
        return (last[:, None] == self.end_ids[rows]).any(1)

    def reason(self, slot: int) -> FinishReason:
        """Why an ended slot ended: an end token on the last allowed place is "stop"."""
        return "stop" if self.text_ended[slot] or self._at_end(np.array([slot]))[0] else "length"

    def beyond(self, starts: Mapping[SampleId, int]) -> list[Response]:
        """What the slots of these samples have beyond so many tokens, where they have more."""
        found = []
        for slot, name in enumerate(self.names):
            start = starts.get(name)
            if start is not None and self.length[slot] > start:
                found.append(self.response(slot, "abort", start))
        return found

    def response(self, slot: int, reason: FinishReason, start: int = 0) -> Response:
        """A copy of what a slot has from token `start` on."""
        row = (slot, slice(start, self.length[slot]))
        top = join_likeliest(self.tops[slot], int(self.num_top[slot]))
        return Response(
            self.names[slot],
            self.tokens[row].copy(),
            self.logprobs[row].copy(),
            self.versions[row].copy(),
            reason,
            None if top is None else top[start:],
        )

    def remove(self, slot: int) -> int:
        """Free a slot by moving the last one into it; returns the slot that moved (the same one: nothing moved)."""
        last = self.count - 1
        self.groups[slot], self.names[slot] = self.groups[last], self.names[last]
        self.prompts[slot], self.tops[slot] = self.prompts[last], self.tops[last]
        del self.groups[last], self.names[last], self.prompts[last], self.tops[last]
        if last != slot:
            used = slice(0, self.length[last])
            for array in (self.tokens, self.logprobs, self.versions):
                array[slot, used] = array[last, used]
            for array in (self.prompt_length, self.cap, self.length, self.cached, self.seed, self.temperature):
                array[slot] = array[last]
            for array in (self.top_k, self.top_p, self.min_p, self.num_top):
                array[slot] = array[last]
            for array in (self.end_ids, self.has_strings, self.text_ended):
                array[slot] = array[last]
        self.count = last
        return last
