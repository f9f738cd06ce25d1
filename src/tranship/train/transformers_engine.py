"""The training engine on one rank: a transformers model, packed groups, one normaliser per optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from tranship.config.schema import TrainConfig
from tranship.layouts.pieces import Piece
from tranship.train.engine import LossFn, LossInputs, Metrics, Totals, loss_needs
from tranship.train.model_folder import (
    checkpoint_activations,
    export_model,
    load_model,
    response_logprobs,
    response_logprobs_and_entropy,
)
from tranship.train.packed_steps import PackedSteps
from tranship.train.packing import Pack, padded, spread
from tranship.train.pieces import model_pieces, routing_buffers
from tranship.train.precision import prepare_device
from tranship.types import TrainBatch


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
        place = prepare_device(device, config.precision, deterministic=deterministic, seed=seed)
        self._model_dir = model_dir
        self._temperature = temperature or 1.0
        self._model = load_model(model_dir, place, trust_remote_code=trust_remote_code)
        if config.activation_checkpointing:
            checkpoint_activations(self._model)
        self._steps = PackedSteps(
            dict(self._model.named_parameters()),
            config.optimizer,
            config=config,
            max_response_tokens=max_response_tokens,
            num_steps=num_steps,
            device=place,
            what="loss",
        )
        self._storages = {**self._steps.parameters, **routing_buffers(self._model)}

    @property
    def num_parameters(self) -> int:
        """Trainable elements, each counted once (tied ones too)."""
        return sum(p.numel() for p in self._steps.parameters.values())

    def update(self, batch: TrainBatch, loss: LossFn, fence: Callable[[], None] = lambda: None) -> dict[str, float]:
        """Train on one batch; see `TrainEngine.update`. Groups without an unmasked token cost nothing.

        A minibatch without any unmasked token takes no optimizer step.
        """
        needs = loss_needs(loss)

        def of_pack(packed: Pack, totals: Totals) -> tuple[torch.Tensor, Metrics]:
            entropy = None
            if needs.entropy:
                flat, entropy = response_logprobs_and_entropy(
                    self._model, packed, temperature=self._temperature, dtype=self._steps.dtype
                )
            else:
                flat = self._logprobs(packed)
            with torch.autocast(flat.device.type, enabled=False):
                return loss(_loss_inputs(batch, packed, flat, entropy), totals)

        report = self._steps.train(batch, of_pack, fence=fence, whole_groups=needs.whole_groups)
        return {
            **report.metrics,
            "loss": report.loss,
            "grad_norm": report.grad_norm,
            "learning_rate": report.learning_rate,
            "num_tokens": float(report.num_tokens),
            "tokens_per_s": report.num_tokens / report.seconds,
        }

    def logprobs(
        self, prompts: Sequence[np.ndarray], group_of: np.ndarray, responses: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Log-probs float32 [T_n] of each response under the current weights; see `TrainEngine.logprobs`."""
        return self._steps.each_response(prompts, group_of, responses, self._logprobs)

    def pieces(self) -> list[Piece]:
        """One piece per tensor of the model's folder; stacked experts are one storage with a piece for each."""
        return model_pieces(self._storages)

    def storage(self, name: str) -> torch.Tensor:
        """The parameter or buffer called `name`, sharing its memory."""
        return self._storages[name].detach()

    def skip(self) -> None:
        """Count a batch that nothing is trained on."""
        self._steps.skip()

    def save(self, folder: Path) -> None:
        """Write weights, optimizer, schedule and random state so that `load` continues bit for bit."""
        self._steps.save(folder)

    def load(self, folder: Path) -> None:
        """Take over what `save` wrote. Raises UserError naming what does not fit."""
        self._steps.load(folder)

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder (weights in safetensors, config, tokenizer, chat template)."""
        export_model(self._model, self._model_dir, folder)

    def _logprobs(self, packed: Pack) -> torch.Tensor:
        return response_logprobs(self._model, packed, temperature=self._temperature, dtype=self._steps.dtype)


def _loss_inputs(batch: TrainBatch, packed: Pack, flat: torch.Tensor, entropy: torch.Tensor | None) -> LossInputs:
    """The microbatch padded to [B, T]; flat, entropy: [M], of the unmasked tokens, in the pack's order."""

    def optional(columns: Sequence[np.ndarray] | None, dtype: type) -> torch.Tensor | None:
        return None if columns is None else padded(packed, columns, dtype)

    groups = np.asarray(batch.group_of)[list(packed.rows)].astype(np.int64)
    return LossInputs(
        logprobs_BT=spread(packed, flat),
        old_logprobs_BT=padded(packed, batch.logprobs, np.float32),
        advantages_BT=padded(packed, batch.advantages, np.float32),
        mask_BT=padded(packed, batch.response_mask, np.bool_),
        ref_logprobs_BT=optional(batch.ref_logprobs, np.float32),
        proximal_logprobs_BT=optional(batch.proximal_logprobs, np.float32),
        on_policy_BT=optional(batch.on_policy, np.bool_),
        group_B=torch.from_numpy(groups).to(flat.device),
        entropy_BT=None if entropy is None else spread(packed, entropy),
    )
