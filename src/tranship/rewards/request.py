"""What a reward is asked about: one response, and what is known of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# What verl gives each function, in its order.
POSITIONAL = ("data_source", "solution_str", "ground_truth", "extra_info")
# What a function gets by name if its signature has that name; `row` is all of it, by these names and verl's.
BY_NAME = (
    "prompt",
    "messages",
    "num_tokens",
    "finish_reason",
    "max_response_tokens",
    "completion_ids",
    "rollout_info",
    "row",
)


@dataclass(frozen=True)
class RewardRequest:
    """One response to score; all values are JSON values.

    solution: the response as text (with an environment the model's last turn, and completion_ids too). prompt: the
    prompt as text, messages: as a conversation (none for a plain prompt). num_tokens: of the whole response,
    max_response_tokens: its cap, completion_ids: its token ids. finish_reason: "stop", "length" or "abort".
    rollout_info: what the rollout noted of the sample (turns, tool calls, the environment's word).
    """

    data_source: str
    solution: str
    ground_truth: Any = None
    extra_info: Mapping[str, Any] | None = None
    prompt: str = ""
    messages: Sequence[Mapping[str, Any]] = ()
    num_tokens: int = 0
    finish_reason: str = "stop"
    max_response_tokens: int = 0
    completion_ids: Sequence[int] = ()
    rollout_info: Mapping[str, Any] = field(default_factory=dict)

    def to_row(self) -> dict[str, Any]:
        """The arguments by the names under which functions get them."""
        return {
            "data_source": self.data_source,
            "solution_str": self.solution,
            "ground_truth": self.ground_truth,
            "extra_info": None if self.extra_info is None else dict(self.extra_info),
            "prompt": self.prompt,
            "messages": [dict(message) for message in self.messages],
            "num_tokens": self.num_tokens,
            "finish_reason": self.finish_reason,
            "max_response_tokens": self.max_response_tokens,
            "completion_ids": list(self.completion_ids),
            "rollout_info": dict(self.rollout_info),
        }
