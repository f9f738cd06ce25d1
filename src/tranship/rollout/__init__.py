"""Rollout engines: the protocol, the table, and the implementations."""

from tranship.rollout.engine import (
    ROLLOUT_ENGINES,
    Capabilities,
    GroupRequest,
    RankLost,
    RolloutEngine,
    SamplesFailed,
)

__all__ = ["ROLLOUT_ENGINES", "Capabilities", "GroupRequest", "RankLost", "RolloutEngine", "SamplesFailed"]
