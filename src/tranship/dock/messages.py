"""What crosses the border between stages and the dock: small, plain, picklable, and never payload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tranship.types import SampleId

Kind = Literal["train", "val"]
HOME = 0  # the number of the dock's own node
Unit = Literal["group", "row"]


class BlockRef(NamedTuple):
    """Where a block lies: nbytes bytes at an offset of a slab, as long as the slab has that generation."""

    slab: int
    generation: int
    offset: int
    nbytes: int


Where = BlockRef | tuple[BlockRef, ...]


@dataclass(frozen=True)
class StageNeeds:
    """A stage as the dock knows it: its name, the columns it reads, and whether it takes whole groups or rows.

    policy: which of what is ready a take gives, an entry of take_policy.POLICIES or module:name. readers: how many
    readers share the stage; balanced and dispatch give each of them its part.
    """

    name: str
    reads: tuple[str, ...]
    unit: Unit = "group"
    policy: str = "first_come"
    readers: int = 1


@dataclass(frozen=True)
class Admission:
    """A new group: `size` samples of one prompt, whose own columns lie in `block`.

    attempt: of its samples; None: 0, or what the snapshot said that the dock was restored from. expected_tokens: how
    long a response of it is predicted to be, at least 1.
    """

    group_id: int
    size: int
    kind: Kind
    block: BlockRef
    columns: tuple[str, ...]
    attempt: int | None = None
    expected_tokens: int = 1


class Load(NamedTuple):
    """What a reader that samples says when it asks for more.

    tokens: predicted to be left of what it has. slots: samples that it decodes at the same time. speed: decoding steps
    a second, of late; None: not known yet.
    """

    tokens: float
    slots: int = 1
    speed: float | None = None


@dataclass(frozen=True)
class Publish:
    """Columns of some rows, written into a slab of `owner`. Each row has all of the columns.

    lease: under which the rows were taken (None: nobody's). sampled_version: the oldest policy version of any token
    in the block, from a stage that samples. tokens: of each row, from a stage that knows how long rows are.
    """

    owner: str
    block: BlockRef
    rows: Sequence[SampleId]
    columns: tuple[str, ...]
    lease: int | None = None
    sampled_version: int | None = None
    tokens: tuple[int, ...] | None = None


class GroupEntry(NamedTuple):
    """A taken group. shared: the blocks of its own columns. samples: the indices of the taken samples. refs: for each
    of the other columns the block that holds it for all of these samples, or one block per sample.

    oldest_version: the oldest policy version of any of its tokens; None before it is sampled. expected_tokens: see
    Admission.
    """

    group_id: int
    size: int
    kind: Kind
    attempt: int
    shared: dict[str, BlockRef]
    samples: tuple[int, ...]
    refs: dict[str, Where]
    oldest_version: int | None = None
    expected_tokens: int = 1


@dataclass(frozen=True)
class Take:
    """What a reader has been given, until the lease ends (`deadline`, of the dock's clock; any message renews it).

    version: the dock's, at the take. window: of a batch, all of its groups in order, the dropped ones among them;
    num_dropped: how many of them were dropped.
    """

    lease: int
    stage: str
    deadline: float
    version: int
    groups: tuple[GroupEntry, ...]
    window: tuple[int, ...] = ()
    num_dropped: int = 0


class Answer(NamedTuple):
    """A take's outcome, and the dock's `seq` when it was decided.

    refused: ready groups were held back because of the sampler's policy version.
    """

    take: Take | None
    seq: int
    refused: bool = False


class Status(NamedTuple):
    """A few numbers about the dock, in one message.

    num_trained: batches trained on. num_unconsumed: training groups that were admitted and are in no such batch.
    """

    seq: int
    version: int
    num_admissible: int
    num_trained: int
    num_unconsumed: int


@dataclass(frozen=True)
class SlabLease:
    """A slab to write into: its generation, its size, and its file (None: memory of the dock's process)."""

    slab: int
    generation: int
    path: str | None
    nbytes: int


class Chore(NamedTuple):
    """What the keeper of a warehouse has to do with a slab's file: make it, of nbytes bytes, or remove it (0)."""

    slab: int
    nbytes: int


class NodePlace(NamedTuple):
    """A warehouse besides the dock's own: the number and the name of its node, the folder of its slabs there, and the
    address of the server that sends runs of their bytes."""

    node: int
    name: str
    folder: str
    runs: str


@dataclass(frozen=True)
class MemoryUse:
    """The payload: bytes of all slabs, of those that hold live rows or are being written, and the budget."""

    held_bytes: int
    busy_bytes: int
    capacity_bytes: int
    refusal: str = ""


@dataclass(frozen=True)
class ExpiredLease:
    """A lease that ended by time: who had it, at which stage, and the groups that went back to the queue."""

    lease: int
    stage: str
    reader: str
    group_ids: tuple[int, ...]
