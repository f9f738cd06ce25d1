"""Drawing tokens within vLLM: a logits processor that draws by our own sampler, and leaves vLLM nothing to choose.

vLLM's own sampler gives log-probs either before the temperature or after every cut, starts a request that goes on after
an interruption with the random numbers that it has used already, and on a CPU refuses seeds for prompts that are
prefilled in parts. So a row's token is drawn here, as `Sampling` says, and its logit is raised above all others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tranship.rollout.native.sampling import RowSampling, draw, join_likeliest, likeliest
from tranship.types import FinishReason, Response, RunError, SampleId, Sampling, TopLogprobs

ROW_KEY = "tranship_row"
"""Where a request's extra arguments name its row."""


@dataclass(eq=False)
class Row:
    """One sample and what it has, or (forced, int32 [T]) tokens whose log-probs are asked for.

    tokens, logprobs, versions, tops: all of the response so far. drawn and drawn_top: token, log-prob and likeliest
    tokens of the last draw, which counts when vLLM has taken it.
    """

    sample: SampleId
    prompt_ids: np.ndarray
    seed: int
    sampling: Sampling
    end_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    forced: np.ndarray | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    tops: list[TopLogprobs] = field(default_factory=list)
    drawn: tuple[int, float] | None = None
    drawn_top: TopLogprobs | None = None

    @property
    def broken(self) -> bool:
        """Whether the last draw was from logits that are not finite."""
        return self.drawn is not None and not math.isfinite(self.drawn[1])

    def take(self, token: int, version: int) -> None:
        """Add the token that vLLM went on with. RunError if it is not the one that was drawn."""
        if self.drawn is None or self.drawn[0] != token:
            raise RunError(
                f"vLLM went on with token {token} for {tuple(self.sample)}, but {self.drawn} was drawn: this build of "
                "vLLM does not use the logits processor that it was given, so that nothing is known of its sampling: "
                "use rollout.engine=native"
            )
        self.tokens.append(token)
        self.logprobs.append(self.drawn[1])
        self.versions.append(version)
        if self.drawn_top is not None:
            self.tops.append(self.drawn_top)
        self.drawn = self.drawn_top = None

    def response(self, reason: FinishReason, start: int = 0) -> Response:
        """The sample as it stands, from token `start` on."""
        top = join_likeliest(self.tops, self.sampling.top_logprobs)
        return Response(
            self.sample,
            np.array(self.tokens[start:], np.int32),
            np.array(self.logprobs[start:], np.float32),
            np.array(self.versions[start:], np.int32),
            reason,
            None if top is None else top[start:],
        )


def processor_class(rows: Mapping[str, Row]) -> type:
    """A class for vLLM's `logits_processors`: it draws for the requests whose `ROW_KEY` is a key of `rows`."""
    from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

    class DrawTokens(LogitsProcessor):
        """Draws one token of every row of the batch."""

        def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
            self._by_place: dict[int, Row] = {}
            self._batch: Batch | None = None

        def is_argmax_invariant(self) -> bool:
            """False: vLLM takes the likeliest token after this."""
            return False

        def update_state(self, batch_update: BatchUpdate | None) -> None:
            """Keep which request stands on which row."""
            process_dict_updates(self._by_place, batch_update, lambda params, *_: rows[params.extra_args[ROW_KEY]])
            if batch_update is not None:
                self._batch = Batch([self._by_place[place] for place in range(batch_update.batch_size)])

        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            """logits float32 [N, V], changed in place: the drawn token's is infinite."""
            assert self._batch is not None
            return self._batch.draw(logits)

    return DrawTokens


class Batch:
    """The rows of vLLM's batch, in its order."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows
        how = [row.sampling for row in rows]
        self._how = RowSampling(
            seed=np.array([row.seed & 0xFFFFFFFFFFFFFFFF for row in rows], np.uint64),
            position=np.zeros(len(rows), np.int64),
            temperature=np.array([one.temperature for one in how], np.float64),
            top_k=np.array([one.top_k for one in how], np.int64),
            top_p=np.array([one.top_p for one in how], np.float64),
            min_p=np.array([one.min_p for one in how], np.float64),
        )

    def draw(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """Draw one token for each row, note it there, and make its logit infinite."""
        assert len(logits_NV) == len(self._rows), (len(logits_NV), len(self._rows))
        self._how.position[:] = [len(row.tokens) for row in self._rows]
        tokens, logprobs = draw(logits_NV, self._how)
        for place, row in enumerate(self._rows):
            if row.forced is not None:
                tokens[place] = row.forced[len(row.tokens)]
                scaled_V = logits_NV[place].float() / (row.sampling.temperature or 1.0)
                logprobs[place] = float(torch.log_softmax(scaled_V, -1)[int(tokens[place])])
            row.drawn = (int(tokens[place]), float(logprobs[place]))
            if row.sampling.top_logprobs:
                row.drawn_top = likeliest(logits_NV[place], row.sampling.temperature, row.sampling.top_logprobs)
            if row.broken:
                logits_NV[place] = 0
        index_N1 = torch.from_numpy(tokens).to(logits_NV.device)[:, None]
        return logits_NV.scatter_(1, index_N1, math.inf)
