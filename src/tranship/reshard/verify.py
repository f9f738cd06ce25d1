"""Weights arrive whole and right, or not at all: digests of every bucket, completeness, and a probe of the result."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tranship.reshard.plan import Bucket, Plan
from tranship.types import RunError

# Largest mean and largest single |log-prob gap| that a probe may show, by the sampler's dtype. In fp32 two
# implementations of one model differ by a few 1e-5; in bf16 by some 1e-2 on average, more on rare tokens: 0.06 on
# average over a probe of 15 tokens was seen with SmolLM2-135M.
_TOLERANCES: Mapping[str, tuple[float, float]] = {"fp32": (2e-4, 2e-3), "bf16": (0.15, 1.5)}


@dataclass(frozen=True)
class Manifest:
    """What a version consists of: the digest of each bucket that one source rank sends, taken after the cast.

    digests: by the bucket's index in the plan that `plan_key` names.
    """

    version: int
    plan_key: str
    digests: Mapping[int, str]


class Arrival:
    """The check of one version at one target rank: every bucket exactly once, each with the digest of its manifest."""

    def __init__(self, plan: Plan, manifest: Manifest, target_rank: int) -> None:
        if manifest.plan_key != plan.key:
            raise RunError(
                f"version {manifest.version}: it was sent by plan {manifest.plan_key}, but the receiver has "
                f"{plan.key}: the two sides know different layouts"
            )
        self.version = manifest.version
        self._digests = manifest.digests
        self._missing = {bucket.index: bucket for bucket in plan.buckets if bucket.target_rank == target_rank}
        self._seen: set[int] = set()

    def accept(self, bucket: Bucket, found: str) -> None:
        """Take note of a bucket and the digest of its bytes as received.

        Raises RunError if the digest is wrong, the bucket was not announced, or it is there already.
        """
        what = f"version {self.version}, bucket {bucket.index}"
        if bucket.index in self._seen:
            raise RunError(f"{what} arrived twice")
        if bucket.index not in self._missing or bucket.index not in self._digests:
            raise RunError(f"{what} was not announced to this rank")
        wanted = self._digests[bucket.index]
        if found != wanted:
            raise RunError(
                f"{what} arrived damaged (digest {found}, announced {wanted}); it holds {_named(bucket)}: "
                "the version is refused"
            )
        self._seen.add(bucket.index)
        del self._missing[bucket.index]

    def complete(self) -> int:
        """The version, once all of it has been accepted. Raises RunError that names what is missing."""
        if self._missing:
            first = next(iter(self._missing.values()))
            raise RunError(
                f"version {self.version} is incomplete: {len(self._missing)} buckets did not arrive, "
                f"the first is {first.index} with {_named(first)}"
            )
        return self.version


def _named(bucket: Bucket) -> str:
    """The bucket's tensors in words."""
    names = list(dict.fromkeys(move.name for move in bucket.moves))
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


@dataclass(frozen=True)
class ProbeGap:
    """|log-prob gap| between trainer and sampler over the tokens of a probe."""

    mean: float
    largest: float


def check_probe(version: int, trainer: np.ndarray, sampler: np.ndarray, dtype: str) -> ProbeGap:
    """The gap between two sides' log-probs float32 [L] of one sequence under one version.

    dtype: the sampler's ("fp32", "bf16"), which sets the tolerance. Raises RunError if the gap exceeds it.
    """
    assert trainer.shape == sampler.shape, f"{trainer.shape} and {sampler.shape}"
    assert trainer.size, "a probe needs at least one token"
    gaps = np.abs(trainer.astype(np.float64) - sampler.astype(np.float64))
    gap = ProbeGap(float(gaps.mean()), float(gaps.max()))
    mean, largest = _TOLERANCES[dtype]
    if not (math.isfinite(gap.largest) and gap.mean <= mean and gap.largest <= largest):
        raise RunError(
            f"version {version}: the sampler's log-probs are not the trainer's: gap {gap.mean:.2g} on average and "
            f"{gap.largest:.2g} at most over {gaps.size} tokens, tolerance in {dtype} {mean:g} and {largest:g}: "
            "the weights in use are not those that were trained"
        )
    return gap
