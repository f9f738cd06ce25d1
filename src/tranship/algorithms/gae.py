"""Advantages of single tokens, from a critic's values."""

from __future__ import annotations

import numpy as np


def gae(
    rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, *, gamma: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """(advantages, returns = advantages + values), float32 [T], of one response; 0 outside the mask.

    Generalised advantage estimation (arXiv:1506.02438, eq. 16): A_t = d_t + gamma * lam * A_next with
    d_t = r_t + gamma * V_next - V_t (eq. 9). `next` is the next unmasked token: tokens between two turns, which the
    model did not write, are no states of its own and are skipped. After the last one V and A are 0.

    rewards, values: float [T]; values[t] is of the state before token t is drawn. mask: bool [T].
    Rewards [0,0,1], values [.5,.6,.7], gamma .9, lam .8: advantages [.21712,.246,.3], returns [.71712,.846,1].
    """
    assert rewards.shape == values.shape == mask.shape, (rewards.shape, values.shape, mask.shape)
    written = np.flatnonzero(mask)
    advantages, returns = np.zeros(len(mask)), np.zeros(len(mask))
    next_value = next_advantage = 0.0
    for t in written[::-1]:
        value = float(values[t])
        surprise = float(rewards[t]) + gamma * next_value - value
        next_advantage = surprise + gamma * lam * next_advantage
        next_value = value
        advantages[t] = next_advantage
        returns[t] = next_advantage + value
    return advantages.astype(np.float32), returns.astype(np.float32)
