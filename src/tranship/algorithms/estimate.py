"""From a group's rewards to advantages of its tokens, as the recipe says; and whitening of a batch of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tranship.algorithms import ADVANTAGES, KL_ESTIMATORS, TOKEN_ADVANTAGES
from tranship.algorithms.advantages import divisor
from tranship.algorithms.arguments import bind
from tranship.config.schema import AlgorithmConfig, CriticConfig
from tranship.lookup import resolve
from tranship.types import UserError


@dataclass(frozen=True)
class GroupRewards:
    """The N scored samples of one group; masked and invalid ones are left out before.

    rewards, raw: float64 [N], after and before shaping. masks: N arrays bool [T_n], True where the model wrote the
    token. logprobs: N arrays float32 [T_n], of the sampler. ref_logprobs: as logprobs, of the reference; needed with
    the KL in the reward. values: as logprobs, of the critic; needed by the estimators of tokens.
    """

    group_id: int
    rewards: np.ndarray
    raw: np.ndarray
    masks: Sequence[np.ndarray]
    logprobs: Sequence[np.ndarray]
    ref_logprobs: Sequence[np.ndarray] | None = None
    values: Sequence[np.ndarray] | None = None


@dataclass(frozen=True)
class GroupAdvantages:
    """What they are worth.

    advantages: N arrays float32 [T_n] (one number per sample, or per token with a critic). returns: N arrays float32
    [T_n] that the critic should learn, or None. has_signal: the raw rewards differ, so that the samples can be told
    apart, whatever shaping or a KL made of them. metrics: name -> (sum, weight).
    """

    advantages: list[np.ndarray]
    returns: list[np.ndarray] | None
    has_signal: bool
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)


Estimate = Callable[[GroupRewards], GroupAdvantages]
# -> coef * KL of each token, N arrays float64 [T_n], 0 outside the mask; and the metric before the coefficient
_Penalty = Callable[[GroupRewards], tuple[list[np.ndarray], dict[str, tuple[float, float]]]]


def make_estimate(algorithm: AlgorithmConfig) -> Estimate:
    """The function from GroupRewards to GroupAdvantages that the recipe describes.

    Per sample (every algorithm but ppo): the estimator sees each sample's reward; with kl.where "reward" and kl.coef
    above 0 less coef * the sum of its tokens' KL. REINFORCE++ (arXiv:2501.03262) sums from token t on instead; the
    expected gradient is the same, since what came before t does not depend on it.

    Per token (ppo): the token rewards are -coef * KL_t, plus the sample's reward at its last unmasked token
    (arXiv:2203.02155, section 3.5 and eq. 2).

    The KL is of the sampler's policy against the reference, by kl.estimator; its mean per token is the metric `kl`.
    Raises UserError for a name that is unknown or of the other kind, and for arguments that the estimator does not
    take.
    """
    penalty = _penalty(algorithm)
    return _of_tokens(algorithm, penalty) if algorithm.flow == "ppo" else _of_samples(algorithm, penalty)


def whiten(advantages: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> list[np.ndarray]:
    """(advantage - mean) / standard deviation over all unmasked tokens of a batch, float32 [T_n]; 0 outside the mask.

    REINFORCE++ (arXiv:2501.03262, "global advantage normalization"). Sums are float64 in sorted order: another order of
    the samples changes no bit. The sample standard deviation is used, and left out where it is below MIN_STD.
    """
    kept = [np.asarray(a, dtype=np.float64)[np.asarray(m)] for a, m in zip(advantages, masks, strict=True)]
    ordered = np.sort(np.concatenate(kept)) if kept else np.zeros(0)
    if not len(ordered):
        return [np.zeros(len(mask), dtype=np.float32) for mask in masks]
    mean, scale = ordered.mean(), divisor(ordered)
    result = []
    for values, mask in zip(kept, masks, strict=True):
        row = np.zeros(len(mask), dtype=np.float32)
        row[np.asarray(mask)] = (values - mean) / scale
        result.append(row)
    return result


def _of_samples(algorithm: AlgorithmConfig, penalty: _Penalty | None) -> Estimate:
    name = algorithm.advantage
    if name in TOKEN_ADVANTAGES:
        raise UserError(
            f"algorithm.advantage: {name!r} needs a critic, which {algorithm.name} has not: use algorithm.name=ppo, or "
            f"one of: {', '.join(ADVANTAGES)}"
        )
    function = resolve(name, ADVANTAGES, "algorithm.advantage")
    estimator, _ = bind(function, 2, algorithm.advantage_args, setting="algorithm.advantage_args")

    def estimate(group: GroupRewards) -> GroupAdvantages:
        rewards, metrics = np.asarray(group.rewards, dtype=np.float64), {}
        if penalty is not None:
            costs, metrics = penalty(group)
            rewards = rewards - np.array([cost.sum() for cost in costs])
        result = estimator(rewards, np.full(len(rewards), group.group_id, dtype=np.int64))
        assert np.shape(result) == rewards.shape, f"{name} returned {np.shape(result)} for {rewards.shape}"
        advantages = [np.full(len(mask), a, dtype=np.float32) for mask, a in zip(group.masks, result, strict=True)]
        return GroupAdvantages(advantages, None, _has_signal(group.raw), metrics)

    return estimate


def _of_tokens(algorithm: AlgorithmConfig, penalty: _Penalty | None) -> Estimate:
    name = algorithm.advantage
    if name in ADVANTAGES and name not in TOKEN_ADVANTAGES:
        raise UserError(
            f"algorithm.advantage: {name!r} gives one number per sample, and {algorithm.name} estimates each token: "
            f"use one of: {', '.join(TOKEN_ADVANTAGES)}"
        )
    critic = algorithm.critic
    function = resolve(name, TOKEN_ADVANTAGES, "algorithm.advantage")
    offered = {"gamma": critic.gamma, "lam": critic.lam}
    estimator, unused = bind(function, 3, algorithm.advantage_args, setting="algorithm.advantage_args", offered=offered)
    for key in unused:
        if offered[key] != CriticConfig.model_fields[key].default:
            raise UserError(f"algorithm.critic.{key} is {offered[key]}, but {name!r} takes no {key}: leave it out")

    def estimate(group: GroupRewards) -> GroupAdvantages:
        assert group.values is not None, f"{name} needs the critic's values"
        costs, metrics = penalty(group) if penalty is not None else (None, {})
        advantages, returns = [], []
        for n, (mask, values) in enumerate(zip(group.masks, group.values, strict=True)):
            rewards = np.zeros(len(mask)) if costs is None else -costs[n]
            written = np.flatnonzero(mask)
            if len(written):
                rewards[written[-1]] += group.rewards[n]
            of_sample, to_learn = estimator(rewards, np.asarray(values), np.asarray(mask))
            advantages.append(of_sample)
            returns.append(to_learn)
        return GroupAdvantages(advantages, returns, _has_signal(group.raw), metrics)

    return estimate


def _penalty(algorithm: AlgorithmConfig) -> _Penalty | None:
    """None where no KL is taken off the reward; then the reference is never looked at."""
    coef = algorithm.kl.coef
    if not coef or algorithm.kl.where != "reward":
        return None
    estimate_kl = resolve(algorithm.kl.estimator, KL_ESTIMATORS, "algorithm.kl.estimator")

    def penalty(group: GroupRewards) -> tuple[list[np.ndarray], dict[str, tuple[float, float]]]:
        assert group.ref_logprobs is not None, "kl.coef is above 0 but the group has no ref_logprobs"
        kls = []
        for logprobs, ref, mask in zip(group.logprobs, group.ref_logprobs, group.masks, strict=True):
            policy_1T, ref_1T = (torch.from_numpy(np.asarray(x, dtype=np.float64))[None] for x in (logprobs, ref))
            kls.append(estimate_kl(policy_1T, ref_1T, torch.from_numpy(np.array(mask))[None])[0].numpy())
        # Sorted, so that the order of the samples changes no bit.
        total = sum(sorted(float(kl.sum()) for kl in kls))
        return [coef * kl for kl in kls], {"kl": (total, float(sum(int(np.sum(mask)) for mask in group.masks)))}

    return penalty


def _has_signal(raw: np.ndarray) -> bool:
    return bool((np.asarray(raw) != raw[0]).any())
