"""Scores of responses: reward functions by name, run in processes that can be killed. Imports no torch."""

from tranship.rewards.pool import RewardPool
from tranship.rewards.table import REWARDS

__all__ = ["REWARDS", "RewardPool"]
