"""The mathematics of a policy update, on plain arrays: advantages, losses, KL estimators, aggregation.

Knows no engine, no dock and no model. Another estimator or loss is a function here and its line in a table, or
`module:name` in the recipe.
"""

from collections.abc import Mapping

# (rewards [N], group_ids [N], **algorithm.advantage_args) -> float32 [N]
ADVANTAGES: Mapping[str, str] = {
    "grpo": "tranship.algorithms.advantages:grpo",
    "rloo": "tranship.algorithms.advantages:rloo",
}

# (logprobs_BT, old_logprobs_BT, advantages_BT, mask_BT, *, clip_low, clip_high, dual_clip)
# -> (token_losses_BT, metrics: name -> (sum, weight))
LOSSES: Mapping[str, str] = {"clip": "tranship.algorithms.losses:clip"}

# (logprobs_BT, ref_logprobs_BT, mask_BT) -> token_kl_BT
KL_ESTIMATORS: Mapping[str, str] = {
    "k1": "tranship.algorithms.kl:k1",
    "k2": "tranship.algorithms.kl:k2",
    "k3": "tranship.algorithms.kl:k3",
}

__all__ = ["ADVANTAGES", "KL_ESTIMATORS", "LOSSES"]
