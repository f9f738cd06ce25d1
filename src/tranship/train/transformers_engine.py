"""The training engine on one rank: a transformers model, packed groups, one normaliser per optimizer step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from tranship.config.schema import TrainConfig
from tranship.layouts.pieces import Piece, full_box
from tranship.train.allocator import keep_freed_memory
from tranship.train.checkpoint import read_state, write_state
from tranship.train.engine import LossFn, LossInputs, Totals
from tranship.train.model_folder import checkpoint_activations, export_model, load_model, response_logprobs
from tranship.train.optim import apply_gradients, learning_rate, make_optimizer
from tranship.train.packing import Pack, Share, pack, rows_by_prompt, split_by_tokens, split_evenly
from tranship.train.precision import products
from tranship.types import RunError, TrainBatch, UserError


class TransformersEngine:
    """`TrainEngine` for any Hugging Face causal language model whose attention can be replaced.

    num_steps: batches of the whole run; the learning rate follows them. temperature: that of the sampler (0 counts as
    1). Weights and optimizer are float32; config.precision bf16 runs the products in bfloat16.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        config: TrainConfig,
        temperature: float,
        max_response_tokens: int,
        num_steps: int,
        device: str,
        seed: int,
        deterministic: bool,
        trust_remote_code: bool = False,
    ) -> None:
        self._device = torch.device(device)
        if deterministic:
            _check_deterministic(self._device, config.precision)
        if self._device.type == "cpu":
            keep_freed_memory()
        torch.manual_seed(seed)
        self._config = config
        self._model_dir = model_dir
        self._temperature = temperature or 1.0
        self._max_response_tokens = max_response_tokens
        self._num_steps = num_steps
        self._dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        self._model = load_model(model_dir, self._device, trust_remote_code=trust_remote_code)
        if config.activation_checkpointing:
            checkpoint_activations(self._model)
        self._parameters = dict(self._model.named_parameters())
        self._optimizer = make_optimizer(self._parameters, config.optimizer)
        self._batches = 0

    @property
    def num_parameters(self) -> int:
        """Trainable elements, each counted once (tied ones too)."""
        return sum(p.numel() for p in self._parameters.values())

    def update(self, batch: TrainBatch, loss: LossFn, fence: Callable[[], None] = lambda: None) -> dict[str, float]:
        """Train on one batch; see `TrainEngine.update`. Groups without an unmasked token cost nothing.

        A minibatch without any unmasked token takes no optimizer step.
        """
        start = time.perf_counter()
        rate = learning_rate(self._config.optimizer, self._batches, self._num_steps)
        sums: dict[str, tuple[float, float]] = {}
        losses: list[float] = []
        norms: list[float] = []
        num_tokens = 0
        shares = rows_by_prompt(len(batch.prompts), batch.group_of)
        for minibatch in split_evenly(shares, self._config.minibatches):
            kept, totals = self._totals(batch, minibatch)
            if not totals.num_tokens:
                continue
            try:
                losses.append(self._accumulate(batch, kept, totals, loss, sums))
                norms.append(
                    apply_gradients(
                        self._optimizer,
                        self._parameters,
                        rate=rate,
                        max_norm=self._config.optimizer.max_grad_norm,
                        fence=fence,
                    )
                )
            finally:
                self._optimizer.zero_grad(set_to_none=True)
            num_tokens += totals.num_tokens
        self._batches += 1
        return {
            **{name: total / weight for name, (total, weight) in sums.items() if weight},
            "loss": float(np.mean(losses)) if losses else 0.0,
            "grad_norm": float(np.mean(norms)) if norms else 0.0,
            "learning_rate": rate,
            "num_tokens": float(num_tokens),
            "tokens_per_s": num_tokens / (time.perf_counter() - start),
        }

    def logprobs(
        self, prompts: Sequence[np.ndarray], group_of: np.ndarray, responses: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Log-probs float32 [T_n] of each response under the current weights; see `TrainEngine.logprobs`."""
        results = [np.zeros(0, dtype=np.float32) for _ in responses]
        shares = rows_by_prompt(len(prompts), np.asarray(group_of))
        with torch.no_grad(), products(self._device, self._dtype):
            for microbatch in self._microbatches(shares, prompts, responses):
                packed = pack(microbatch, prompts, responses, wanted=None, device=self._device)
                flat = self._logprobs(packed).cpu().numpy()
                stops = np.cumsum([len(responses[row]) for row in packed.rows])
                for row, part in zip(packed.rows, np.split(flat, stops[:-1]), strict=True):
                    results[row] = part
        return results

    def pieces(self) -> list[Piece]:
        """One piece per parameter: the whole of it, in a storage of its own name; a tied head is not a second one."""
        return [
            Piece(
                name=name,
                shape=tuple(p.shape),
                box=full_box(tuple(p.shape)),
                storage=name,
                storage_box=full_box(tuple(p.shape)),
                dtype=str(p.dtype).removeprefix("torch."),
            )
            for name, p in self._parameters.items()
        ]

    def storage(self, name: str) -> torch.Tensor:
        """The parameter called `name`, sharing its memory."""
        return self._parameters[name].detach()

    def save(self, folder: Path) -> None:
        """Write weights, optimizer, schedule and random state so that `load` continues bit for bit."""
        write_state(folder, self._parameters, self._optimizer, {"batches": self._batches})

    def load(self, folder: Path) -> None:
        """Take over what `save` wrote. Raises UserError naming what does not fit."""
        progress = read_state(folder, self._parameters, self._optimizer)
        self._batches = int(progress["batches"])

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder (weights in safetensors, config, tokenizer, chat template)."""
        export_model(self._model, self._model_dir, folder)

    def _totals(self, batch: TrainBatch, minibatch: Sequence[Share]) -> tuple[list[Share], Totals]:
        """(the shares less rows without an unmasked token, the step's normalisers)."""
        counts = {row: int(batch.response_mask[row].sum()) for share in minibatch for row in share.rows}
        kept = [Share(share.prompt, tuple(row for row in share.rows if counts[row])) for share in minibatch]
        totals = Totals(
            num_tokens=sum(counts.values()),
            num_sequences=sum(count > 0 for count in counts.values()),
            max_response_tokens=self._max_response_tokens,
        )
        return [share for share in kept if share.rows], totals

    def _accumulate(
        self,
        batch: TrainBatch,
        shares: Sequence[Share],
        totals: Totals,
        loss: LossFn,
        sums: dict[str, tuple[float, float]],
    ) -> float:
        """Add up the gradients of one optimizer step and its metrics (into sums); returns its loss."""
        total = 0.0
        with products(self._device, self._dtype):
            for microbatch in self._microbatches(shares, batch.prompts, batch.responses):
                packed = pack(
                    microbatch, batch.prompts, batch.responses, wanted=batch.response_mask, device=self._device
                )
                flat = self._logprobs(packed)
                with torch.autocast(self._device.type, enabled=False):
                    part, metrics = loss(_loss_inputs(batch, packed, flat), totals)
                value = float(part.detach())
                if not math.isfinite(value):
                    ids = [tuple(batch.samples[row]) for row in packed.rows]
                    raise RunError(
                        f"the loss is {value}, not finite (samples among {ids[:8]}): this step changed no weight"
                    )
                with torch.autocast(self._device.type, enabled=False):
                    part.backward()
                total += value
                for name, (part_sum, weight) in metrics.items():
                    before = sums.get(name, (0.0, 0.0))
                    sums[name] = before[0] + part_sum, before[1] + weight
        return total

    def _microbatches(
        self, shares: Sequence[Share], prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray]
    ) -> list[list[Share]]:
        return split_by_tokens(
            shares, [len(p) for p in prompts], [len(r) for r in responses], self._config.microbatch_tokens
        )

    def _logprobs(self, packed: Pack) -> torch.Tensor:
        return response_logprobs(self._model, packed, temperature=self._temperature, dtype=self._dtype)


def _loss_inputs(batch: TrainBatch, packed: Pack, flat: torch.Tensor) -> LossInputs:
    """The microbatch padded to [B, T]; flat: log-probs [M] of the unmasked tokens, in the pack's order."""
    shape = (len(packed.rows), packed.max_response)

    def padded(columns: Sequence[np.ndarray], dtype: type) -> torch.Tensor:
        result = np.zeros(shape, dtype=dtype)
        for place, row in enumerate(packed.rows):
            result[place, : len(columns[row])] = columns[row]
        return torch.from_numpy(result).to(flat.device)

    def optional(columns: Sequence[np.ndarray] | None) -> torch.Tensor | None:
        return None if columns is None else padded(columns, np.float32)

    return LossInputs(
        logprobs_BT=flat.new_zeros(shape[0] * shape[1]).index_copy(0, packed.slot, flat).view(shape),
        old_logprobs_BT=padded(batch.logprobs, np.float32),
        advantages_BT=padded(batch.advantages, np.float32),
        mask_BT=padded(batch.response_mask, np.bool_),
        ref_logprobs_BT=optional(batch.ref_logprobs),
        proximal_logprobs_BT=optional(batch.proximal_logprobs),
        on_policy_BT=None if batch.on_policy is None else padded(batch.on_policy, np.bool_),
    )


def _check_deterministic(device: torch.device, precision: str) -> None:
    threads = torch.get_num_threads()
    if device.type != "cpu" or precision != "fp32" or threads != 1:
        raise UserError(
            f"deterministic training needs a cpu, fp32 and 1 thread, not {device.type}, {precision} and {threads}"
        )
