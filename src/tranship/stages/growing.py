"""A sample that grows turn by turn: what the model wrote, and what others wrote between."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tranship.types import FinishReason, Response, SampleId


@dataclass
class GrowingSample:
    """prompt int32 [P]; parts and masks: what follows it, mask True where the model wrote. All of it counts towards the
    cap of a response."""

    sample: SampleId
    prompt: np.ndarray
    parts: list[Response] = field(default_factory=list)
    masks: list[np.ndarray] = field(default_factory=list)
    num_tokens: int = 0

    def add_turn(self, response: Response) -> None:
        """Append what the model wrote."""
        self._append(response, True)

    def add_others(self, ids: np.ndarray, policy_version: int) -> None:
        """Append what the model did not write, int32 [S]: its log-probs are 0, its version the one that is given."""
        count = len(ids)
        versions = np.full(count, policy_version, np.int32)
        self._append(Response(self.sample, ids, np.zeros(count, np.float32), versions, "abort"), False)

    def keep(self, num_parts: int) -> None:
        """Drop all parts but the first ones."""
        self.num_tokens -= sum(len(part.token_ids) for part in self.parts[num_parts:])
        del self.parts[num_parts:], self.masks[num_parts:]

    def tokens(self) -> np.ndarray:
        """Prompt and all that follows, int32."""
        return np.concatenate([self.prompt, *(part.token_ids for part in self.parts)]).astype(np.int32)

    def response(self, finish_reason: FinishReason) -> Response:
        """All that follows the prompt, as one response."""
        return Response(
            self.sample,
            np.concatenate([np.empty(0, np.int32), *(part.token_ids for part in self.parts)]).astype(np.int32),
            np.concatenate([np.empty(0, np.float32), *(part.logprobs for part in self.parts)]).astype(np.float32),
            np.concatenate([np.empty(0, np.int32), *(part.policy_versions for part in self.parts)]).astype(np.int32),
            finish_reason,
        )

    def mask(self) -> np.ndarray:
        """bool [T], True where the model wrote the token."""
        return np.concatenate([np.empty(0, bool), *self.masks]).astype(bool)

    def _append(self, part: Response, written_by_model: bool) -> None:
        self.parts.append(part)
        self.masks.append(np.full(len(part.token_ids), written_by_model))
        self.num_tokens += len(part.token_ids)
