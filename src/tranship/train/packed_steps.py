"""Optimizer steps over packed batches: what the policy's engine and the critic's share. Knows no model and no loss."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tranship.config.schema import OptimizerConfig, TrainConfig
from tranship.train.checkpoint import read_state, write_state
from tranship.train.engine import Metrics, Totals
from tranship.train.optim import apply_gradients, learning_rate, make_optimizer
from tranship.train.packing import Pack, Share, pack, rows_by_prompt, split_by_tokens, split_evenly
from tranship.train.precision import products
from tranship.types import RunError, TrainBatch

# A microbatch -> (its share of the step's loss, with a graph to the parameters; metrics).
PackLoss = Callable[[Pack, Totals], tuple[torch.Tensor, Metrics]]


@dataclass(frozen=True)
class BatchReport:
    """What training on one batch gave: means over its optimizer steps, and over what the metrics are weighted by."""

    metrics: dict[str, float]
    loss: float
    grad_norm: float
    learning_rate: float
    num_tokens: int
    seconds: float


class PackedSteps:
    """Parameters with their optimizer and schedule, and the split of batches into minibatches and microbatches.

    num_steps: batches of the whole run; the learning rate follows them. what: the name of the loss in errors.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        optimizer: OptimizerConfig,
        *,
        config: TrainConfig,
        max_response_tokens: int,
        num_steps: int,
        device: torch.device,
        what: str,
    ) -> None:
        self.parameters = parameters
        self.device = device
        self.dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        self._settings = optimizer
        self._optimizer = make_optimizer(parameters, optimizer)
        self._minibatches = config.minibatches
        self._microbatch_tokens = config.microbatch_tokens
        self._max_response_tokens = max_response_tokens
        self._num_steps = num_steps
        self._what = what
        self._batches = 0

    def train(
        self, batch: TrainBatch, loss: PackLoss, *, fence: Callable[[], None], whole_groups: bool = False
    ) -> BatchReport:
        """Take one optimizer step per minibatch; see `TrainEngine.update`.

        Groups without an unmasked token cost nothing, and a minibatch without one takes no step. whole_groups: a
        prompt's samples, those without an unmasked token too, come in one microbatch.
        """
        start = time.perf_counter()
        rate = learning_rate(self._settings, self._batches, self._num_steps)
        sums: Metrics = {}
        losses: list[float] = []
        norms: list[float] = []
        num_tokens = 0
        shares = rows_by_prompt(len(batch.prompts), batch.group_of)
        for minibatch in split_evenly(shares, self._minibatches):
            kept, totals = self._totals(batch, minibatch, whole_groups)
            if not totals.num_tokens:
                continue
            try:
                losses.append(self._accumulate(batch, kept, totals, loss, sums, whole_groups))
                norms.append(
                    apply_gradients(
                        self._optimizer,
                        self.parameters,
                        rate=rate,
                        max_norm=self._settings.max_grad_norm,
                        fence=fence,
                    )
                )
            finally:
                self._optimizer.zero_grad(set_to_none=True)
            num_tokens += totals.num_tokens
        self._batches += 1
        return BatchReport(
            metrics={name: total / weight for name, (total, weight) in sums.items() if weight},
            loss=float(np.mean(losses)) if losses else 0.0,
            grad_norm=float(np.mean(norms)) if norms else 0.0,
            learning_rate=rate,
            num_tokens=num_tokens,
            seconds=time.perf_counter() - start,
        )

    def skip(self) -> None:
        """Count a batch that nothing is trained on: the schedule follows the batches of the run."""
        self._batches += 1

    def each_response(
        self,
        prompts: Sequence[np.ndarray],
        group_of: np.ndarray,
        responses: Sequence[np.ndarray],
        compute: Callable[[Pack], torch.Tensor],
    ) -> list[np.ndarray]:
        """What `compute` gives for each response token (float32 [M] of a pack), by response [T_n]; no gradients."""
        results = [np.zeros(0, dtype=np.float32) for _ in responses]
        shares = rows_by_prompt(len(prompts), np.asarray(group_of))
        with torch.no_grad(), products(self.device, self.dtype):
            for microbatch in self._microbatches(shares, prompts, responses, whole_groups=False):
                packed = pack(microbatch, prompts, responses, wanted=None, device=self.device)
                flat = compute(packed).cpu().numpy()
                stops = np.cumsum([len(responses[row]) for row in packed.rows])
                for row, part in zip(packed.rows, np.split(flat, stops[:-1]), strict=True):
                    results[row] = part
        return results

    def save(self, folder: Path) -> None:
        """Write parameters, optimizer, schedule and random state so that `load` continues bit for bit."""
        write_state(folder, self.parameters, self._optimizer, {"batches": self._batches})

    def load(self, folder: Path) -> None:
        """Take over what `save` wrote. Raises UserError naming what does not fit."""
        progress = read_state(folder, self.parameters, self._optimizer)
        self._batches = int(progress["batches"])

    def _totals(self, batch: TrainBatch, minibatch: Sequence[Share], whole_groups: bool) -> tuple[list[Share], Totals]:
        """(the shares with something to learn, less rows without an unmasked token; the step's normalisers)."""
        counts = {row: int(batch.response_mask[row].sum()) for share in minibatch for row in share.rows}
        shares = [share for share in minibatch if any(counts[row] for row in share.rows)]
        totals = Totals(
            num_tokens=sum(counts.values()),
            num_sequences=sum(count > 0 for count in counts.values()),
            max_response_tokens=self._max_response_tokens,
            num_groups=len(shares),
        )
        if not whole_groups:
            shares = [Share(share.prompt, tuple(row for row in share.rows if counts[row])) for share in shares]
        return shares, totals

    def _accumulate(
        self,
        batch: TrainBatch,
        shares: Sequence[Share],
        totals: Totals,
        loss: PackLoss,
        sums: Metrics,
        whole_groups: bool,
    ) -> float:
        """Add up the gradients of one optimizer step and its metrics (into sums); returns its loss."""
        total = 0.0
        with products(self.device, self.dtype):
            for microbatch in self._microbatches(shares, batch.prompts, batch.responses, whole_groups=whole_groups):
                packed = pack(
                    microbatch, batch.prompts, batch.responses, wanted=batch.response_mask, device=self.device
                )
                part, metrics = loss(packed, totals)
                value = float(part.detach())
                if not math.isfinite(value):
                    ids = [tuple(batch.samples[row]) for row in packed.rows]
                    raise RunError(
                        f"the {self._what} is {value}, not finite (samples among {ids[:8]}): "
                        "this step changed no weight"
                    )
                with torch.autocast(self.device.type, enabled=False):
                    part.backward()
                total += value
                for name, (part_sum, weight) in metrics.items():
                    before = sums.get(name, (0.0, 0.0))
                    sums[name] = before[0] + part_sum, before[1] + weight
        return total

    def _microbatches(
        self,
        shares: Sequence[Share],
        prompts: Sequence[np.ndarray],
        responses: Sequence[np.ndarray],
        *,
        whole_groups: bool,
    ) -> list[list[Share]]:
        return split_by_tokens(
            shares,
            [len(p) for p in prompts],
            [len(r) for r in responses],
            self._microbatch_tokens,
            whole=whole_groups,
        )
