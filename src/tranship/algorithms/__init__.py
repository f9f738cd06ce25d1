"""The mathematics of a policy update, on plain arrays: advantages, losses, corrections, KL estimators, aggregation.

Knows no engine, no dock and no model. Another entry of a table is a function here and its line below, or
`module:name` or `file.py:name` in the recipe. Further keyword parameters of an entry are set by the recipe
(`advantage_args`, `loss_args`, `correction.args`).
"""

from collections.abc import Mapping

# Per sample: (rewards [N], group_ids [N], **algorithm.advantage_args) -> float32 [N]
ADVANTAGES: Mapping[str, str] = {
    "grpo": "tranship.algorithms.advantages:grpo",
    "rloo": "tranship.algorithms.advantages:rloo",
    "reinforce": "tranship.algorithms.advantages:reinforce",
}

# Per token, with a critic: (rewards [T], values [T], mask [T], *, gamma, lam, **algorithm.advantage_args)
# -> (advantages float32 [T], returns float32 [T])
TOKEN_ADVANTAGES: Mapping[str, str] = {"gae": "tranship.algorithms.gae:gae"}

# (logprobs_BT, old_logprobs_BT, advantages_BT, mask_BT, *, those of clip_low, clip_high and dual_clip that it takes,
# **algorithm.loss_args) -> (token_losses_BT, metrics: name -> (sum, weight))
LOSSES: Mapping[str, str] = {
    "clip": "tranship.algorithms.losses:clip",
    "gspo": "tranship.algorithms.losses:gspo",
    "cispo": "tranship.algorithms.losses:cispo",
    "reinforce": "tranship.algorithms.losses:reinforce",
    "sft": "tranship.algorithms.losses:sft",
}

# (chosen_P, rejected_P: log(policy / reference) of the whole responses of P pairs, **algorithm.loss_args)
# -> (losses_P, metrics: name -> (sum, weight))
PAIR_LOSSES: Mapping[str, str] = {
    "dpo": "tranship.algorithms.pairs:dpo",
    "ipo": "tranship.algorithms.pairs:ipo",
}

# (logprobs_BT, ref_logprobs_BT, mask_BT) -> token_kl_BT
KL_ESTIMATORS: Mapping[str, str] = {
    "k1": "tranship.algorithms.kl:k1",
    "k2": "tranship.algorithms.kl:k2",
    "k3": "tranship.algorithms.kl:k3",
}

# (behaviour_logprobs_BT, proximal_logprobs_BT, mask_BT, **algorithm.correction.args)
# -> (weights_BT without gradient, kept_BT bool, metrics: name -> (sum, weight)); "none" is the absence of one.
CORRECTIONS: Mapping[str, str] = {
    "truncated_token": "tranship.algorithms.corrections:truncated_token",
    "truncated_sequence": "tranship.algorithms.corrections:truncated_sequence",
    "band_token": "tranship.algorithms.corrections:band_token",
    "band_sequence": "tranship.algorithms.corrections:band_sequence",
    "decoupled": "tranship.algorithms.corrections:decoupled",
}

__all__ = ["ADVANTAGES", "CORRECTIONS", "KL_ESTIMATORS", "LOSSES", "PAIR_LOSSES", "TOKEN_ADVANTAGES"]
