"""One name of another system, and the differences that several of them share."""

from __future__ import annotations

from typing import NamedTuple


class Name(NamedTuple):
    """One name of another system. note: where its unit or its values differ from ours."""

    system: str
    name: str
    key: str
    note: str = ""


PROMPTS = "counts prompts; ours counts samples: multiply by rollout.group_size"
PROMPTS_MINI = "counts the prompts of one optimizer step; ours is the number of optimizer steps per batch"
SAMPLES_MINI = "counts the samples of one optimizer step; ours is the number of optimizer steps per batch"
ONE_PASS = "passes over a batch there; one here, in so many optimizer steps"
ROWS = "counts rows; ours is the most packed tokens of one forward pass"
TOP_K = "-1 means all tokens there, 0 here"
NEVER = "-1 means never there, 0 here"
EPOCHS = "counts passes over the data; ours counts batches"
RATIO = "a share of the steps; ours is a number of steps"
BF16 = "true is bf16 here, false fp32"
SPELLING = "bfloat16 and float32 are bf16 and fp32 here"
RESUME = "true is auto here, false never"
BETAS = "both betas are one list here, [0.9, 0.999]"
TENSORBOARD = "tensorboard is an entry of this list"
WANDB = "wandb is an entry of this list"

CLIP_BOTH = "sets both bounds; here also algorithm.clip_high"
KL_TYPES = "kl is k1 here, mse k2, low_var_kl k3"
KL_SWITCH = "false is 0 here"
KL_WHERE = "true is loss here, false reward"
KL_REWARD = "of the KL in the reward there: algorithm.kl.where=reward"
LAM = "1 there, 0.95 here"
VALUE_CLIP = "0.5 there, 0.2 here"
ESTIMATORS = (
    "gae is ppo here, reinforce_plus_plus reinforce_pp, reinforce_plus_plus_baseline reinforce_pp_baseline; grpo and "
    "rloo are the same"
)
GROUP_NORM = "group_norm is grpo here, gae ppo"
REPLACED = "groups whose rewards are all equal are replaced one by one here"
REFILLS = "counts batches of generated prompts there; as many times a batch's prompts were replaced here"
TIS = "true is truncated_token here, false none"
CAP = "its entry cap"
NO_CRITIC_ONLY = "-1 is 0 here"
ONE_FUNCTION = "file.py:function in one value here"
