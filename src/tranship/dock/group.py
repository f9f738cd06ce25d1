"""A group's record in the dock: which of its columns lie where, how old its tokens are, and who still looks at it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from tranship.dock.messages import BlockRef, GroupEntry, Kind, Where
from tranship.types import SampleId

OWN = -1  # the sample index of a group's own columns
_NOTHING: Mapping[str, BlockRef] = {}
_NONE_SHARED: dict[str, BlockRef] = {}
_SAMPLES = [tuple(range(size)) for size in range(65)]


def all_samples(size: int) -> tuple[int, ...]:
    """The sample indices of a group of that size."""
    return _SAMPLES[size] if size < len(_SAMPLES) else tuple(range(size))


@dataclass(eq=False)
class Group:
    """One group and its `size` samples.

    columns: column -> sample index (or OWN) -> block. whole: column -> the one block that brought it for all samples;
    a column stands in one of the two, and `whole` is shared with other groups: it is replaced, never changed. slabs:
    how many of its rows lie in each slab. tokens: sample index -> how long it is, as the first publisher that said so;
    expected_tokens: how long a response was predicted to be. round: the dock's version when it was admitted.
    declared: the policy version at which a sampler took it; published: the oldest version of the tokens that came back;
    start_lease: under which lease it was taken to be sampled. pins: leases that may still read it. in_batch: it is
    being trained on. here: it has not left the dock.
    """

    group_id: int
    size: int
    kind: Kind
    attempt: int
    expected_tokens: int = 1
    round: int = 0
    columns: dict[str, dict[int, BlockRef]] = field(default_factory=dict)
    whole: Mapping[str, BlockRef] = field(default_factory=lambda: _NOTHING)
    slabs: Counter[int] = field(default_factory=Counter)
    tokens: dict[int, int] = field(default_factory=dict)
    declared: int | None = None
    published: int | None = None
    start_lease: int | None = None
    pins: int = 0
    in_batch: bool = False
    here: bool = True

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version of any of its tokens, as far as is known; None before it is sampled."""
        if self.declared is None or self.published is None:
            return self.published if self.declared is None else self.declared
        return min(self.declared, self.published)

    @property
    def num_tokens(self) -> int:
        """Tokens of its samples, as far as they were said; before any was, as they were predicted."""
        return sum(self.tokens.values()) if self.tokens else self.size * self.expected_tokens

    def has(self, column: str, sample_index: int) -> bool:
        """Whether a row has a column, of its own or from its group."""
        refs = self.columns.get(column, {})
        return sample_index in refs or OWN in refs or column in self.whole

    def has_none_of(self, columns: Sequence[str]) -> bool:
        """Whether no row of it has any of the columns."""
        return self.whole.keys().isdisjoint(columns) and self.columns.keys().isdisjoint(columns)

    def is_complete(self, column: str) -> bool:
        """Whether every sample has a column."""
        refs = self.columns.get(column, {})
        return OWN in refs or len(refs) == self.size or column in self.whole

    def store(self, column: str, sample_index: int, ref: BlockRef) -> list[int]:
        """Record where a column of a row lies; returns the sample indices that have it only now."""
        assert column not in self.whole, column
        refs = self.columns.setdefault(column, {})
        new = [index for index in range(self.size) if index not in refs] if sample_index == OWN else [sample_index]
        refs[sample_index] = ref
        return new

    def dump(self, column_sets: dict[tuple[str, ...], int]) -> list[Any]:
        """Everything but who looks at it and whether it is here, as plain values, for `load`; columns that lie in one
        block stand together, as the place of their names in column_sets, which are added to it."""
        whole: dict[BlockRef, list[str]] = {}
        for column, ref in self.whole.items():
            whole.setdefault(ref, []).append(column)
        single: dict[tuple[int, BlockRef], list[str]] = {}
        for column, refs in self.columns.items():
            for index, ref in refs.items():
                single.setdefault((index, ref), []).append(column)

        def place(columns: list[str]) -> int:
            return column_sets.setdefault(tuple(sorted(columns)), len(column_sets))

        return [
            *(self.group_id, self.size, self.kind, self.attempt, self.expected_tokens, self.round),
            *(self.declared, self.published, self.start_lease, self.in_batch),
            [[place(columns), *ref] for ref, columns in sorted(whole.items())],
            [[place(columns), index, *ref] for (index, ref), columns in sorted(single.items())],
            list(chain.from_iterable(sorted(self.slabs.items()))),
            list(chain.from_iterable(sorted(self.tokens.items()))),
        ]

    @classmethod
    def load(cls, plain: Sequence[Any], column_sets: Sequence[Sequence[str]]) -> Group:
        """The group that was dumped."""
        head, (declared, published, start_lease, in_batch, whole, single, slabs, tokens) = plain[:6], plain[6:]
        group = cls(*head)
        group.declared, group.published = declared, published
        group.start_lease, group.in_batch = start_lease, in_batch
        group.whole = {column: BlockRef(*ref) for place, *ref in whole for column in column_sets[place]}
        for place, index, *ref in single:
            block = BlockRef(*ref)
            for column in column_sets[place]:
                group.columns.setdefault(column, {})[index] = block
        group.slabs.update(dict(zip(slabs[::2], slabs[1::2], strict=True)))
        group.tokens.update(dict(zip(tokens[::2], tokens[1::2], strict=True)))
        return group

    def sample(self, sample_index: int) -> SampleId:
        """The identity of one of its samples."""
        return SampleId(self.group_id, sample_index, self.attempt)

    def entry(
        self, reads: Sequence[str], indices: Sequence[int] | None, known: dict[int, dict[str, Where]]
    ) -> GroupEntry:
        """What a reader of some columns needs to find them, for some samples (None: all).

        known: filled and used by the entries of one take, for groups that share `whole`.
        """
        samples = all_samples(self.size) if indices is None else tuple(indices)
        own: dict[str, Where] | None = known.get(id(self.whole))
        if own is None and self.whole.keys() >= set(reads):
            own = {column: self.whole[column] for column in reads}
            known[id(self.whole)] = own
        if own is not None:
            return self._entry(_NONE_SHARED, samples, own)
        shared: dict[str, BlockRef] = {}
        refs: dict[str, Where] = {}
        for column in reads:
            if column in self.whole:
                refs[column] = self.whole[column]
            elif OWN in (partial := self.columns[column]):
                shared[column] = partial[OWN]
            else:
                each = tuple(partial[index] for index in samples)
                refs[column] = each[0] if each.count(each[0]) == len(each) else each
        return self._entry(shared, samples, refs)

    def _entry(self, shared: dict[str, BlockRef], samples: tuple[int, ...], refs: dict[str, Where]) -> GroupEntry:
        head = self.group_id, self.size, self.kind, self.attempt
        return GroupEntry(*head, shared, samples, refs, self.oldest_version, self.expected_tokens)
