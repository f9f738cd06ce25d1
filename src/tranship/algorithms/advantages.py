"""Advantages of whole groups of samples. Groups are told apart by id; where a row stands never matters.

Common policy of those that compare samples with each other (all but `reinforce`): a group of one sample has
advantage 0, and so has each sample of a group whose rewards are all equal. A division by a standard deviation is left
out where that is below MIN_STD, so rewards of spread <= 1 never give an advantage above 1 / MIN_STD = 100 in size.
A NaN reward makes its group NaN: it is the caller's to leave out.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

MIN_STD = 0.01


def grpo(rewards: np.ndarray, group_ids: np.ndarray, *, scale_by_std: bool = True) -> np.ndarray:
    """float32 [N]: (reward - mean of its group) / sample standard deviation of its group (arXiv:2402.03300, 4.1.2).

    rewards: float [N]; group_ids: [N], in any order. scale_by_std=False leaves the division out (Dr. GRPO,
    arXiv:2503.20783). Groups a,b,a,c,a,b with rewards 1,5,0,7,1,5 give .5774, 0, -1.1547, 0, .5774, 0.
    """

    def of_group(values: np.ndarray) -> np.ndarray:
        ordered = np.sort(values)
        centred = values - ordered.mean()
        return centred / divisor(ordered) if scale_by_std else centred

    return _per_group(rewards, group_ids, of_group)


def rloo(rewards: np.ndarray, group_ids: np.ndarray, *, scale_by_std: bool = False) -> np.ndarray:
    """float32 [N]: reward - mean of the other rewards of its group (leave-one-out, arXiv:2402.14740).

    scale_by_std=True divides by the sample standard deviation of those others. [1,0,0,0] gives 1, -1/3, -1/3, -1/3.
    [0] + [.95] * 7 scaled gives -.95 for the first: the others do not vary, so nothing is divided.
    """

    def of_group(values: np.ndarray) -> np.ndarray:
        order = np.argsort(values, kind="stable")
        ordered = values[order]
        result = np.empty_like(values)
        for rank, position in enumerate(order):
            others = np.delete(ordered, rank)
            centred = values[position] - others.mean()
            result[position] = centred / divisor(others) if scale_by_std else centred
        return result

    return _per_group(rewards, group_ids, of_group)


def reinforce(rewards: np.ndarray, group_ids: np.ndarray) -> np.ndarray:
    """float32 [N]: the rewards themselves, compared with nothing (Williams 1992, eq. 4 with baseline 0).

    The policy above does not apply: a group of one, or of equal rewards, is worth its reward, so a recipe with this
    sets keep_groups_without_signal. Rewards far from 0 give advantages as far: see algorithm.whiten_advantages.
    """
    values = np.asarray(rewards, dtype=np.float64)
    assert values.ndim == 1, f"rewards must be [N], not {values.shape}"
    assert values.shape == np.shape(group_ids), f"rewards {values.shape} and group_ids {np.shape(group_ids)} differ"
    return values.astype(np.float32)


def _per_group(rewards: np.ndarray, group_ids: np.ndarray, of_group: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """float32 [N]: `of_group` applied to the float64 rewards of each group that varies; 0 for the rest.

    The estimators sum in sorted order, so that a permutation of the rows changes no bit.
    """
    values = np.asarray(rewards, dtype=np.float64)
    ids = np.asarray(group_ids)
    assert values.ndim == 1, f"rewards must be [N], not {values.shape}"
    assert values.shape == ids.shape, f"rewards {values.shape} and group_ids {ids.shape} differ"
    result = np.zeros(len(values), dtype=np.float64)
    _, inverse, sizes = np.unique(ids, return_inverse=True, return_counts=True)
    by_group = np.argsort(inverse, kind="stable")
    for rows in np.split(by_group, np.cumsum(sizes)[:-1]):
        group = values[rows]
        if len(group) < 2 or (group == group[:1]).all():
            result[rows] = group - group
        else:
            result[rows] = of_group(group)
    return result.astype(np.float32)


def divisor(rewards: np.ndarray) -> float:
    """Their sample standard deviation, or 1 where that is below MIN_STD or there is only one."""
    if len(rewards) < 2:
        return 1.0
    std = float(rewards.std(ddof=1))
    return 1.0 if std < MIN_STD else std
