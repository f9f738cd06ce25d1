"""PPO's critic on one rank: a language model's layers with one number per token in place of its head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from tranship.config.schema import CriticConfig, TrainConfig
from tranship.train.engine import Metrics, Totals, ValueInputs, ValueLossFn
from tranship.train.model_folder import checkpoint_activations, load_model, response_hidden
from tranship.train.packed_steps import PackedSteps
from tranship.train.packing import Pack, padded, spread
from tranship.train.precision import prepare_device
from tranship.types import TrainBatch

# What Hugging Face's sequence classifiers call their output layer.
HEAD_NAMES = ("score", "classifier")


class TransformersCritic:
    """`CriticEngine` for any Hugging Face causal language model whose attention can be replaced.

    model_dir: where the weights begin: the policy's folder (critic.path null), whose value head is all zeros, so that
    its first values are exactly 0; or the folder that critic.path means, whose classification head of one label
    becomes the value head (zeros where it has none). num_steps: batches of the whole run; the learning rate follows
    them. critic.optimizer is the critic's own; minibatches, microbatches and precision are those of config. Weights
    and optimizer are float32.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        config: TrainConfig,
        critic: CriticConfig,
        max_response_tokens: int,
        num_steps: int,
        device: str,
        seed: int,
        deterministic: bool,
        trust_remote_code: bool = False,
    ) -> None:
        place = prepare_device(device, config.precision, deterministic=deterministic, seed=seed)
        language_model = load_model(model_dir, place, trust_remote_code=trust_remote_code, need_head=False)
        if config.activation_checkpointing:
            checkpoint_activations(language_model)
        self._model = _ValueModel(language_model).to(place)
        if critic.path is not None:
            _take_over_head(self._model.head, model_dir)
        self._steps = PackedSteps(
            dict(self._model.named_parameters()),
            critic.optimizer,
            config=config,
            max_response_tokens=max_response_tokens,
            num_steps=num_steps,
            device=place,
            what="critic's loss",
        )

    def values(
        self, prompts: Sequence[np.ndarray], group_of: np.ndarray, responses: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Values float32 [T_n] of each response token: of the state from which that token is drawn."""
        return self._steps.each_response(prompts, group_of, responses, self._model)

    def update(
        self, batch: TrainBatch, loss: ValueLossFn, fence: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """Train on one batch; see `CriticEngine.update`.

        Returns critic_value_loss, critic_grad_norm, critic_learning_rate, and the means of the loss's metrics, each
        as `critic_` + its name.
        """
        old_values, returns = batch.values, batch.returns
        assert old_values is not None, "the critic learns from a batch with values"
        assert returns is not None, "the critic learns from a batch with returns"

        def of_pack(packed: Pack, totals: Totals) -> tuple[torch.Tensor, Metrics]:
            flat = self._model(packed)
            inputs = ValueInputs(
                values_BT=spread(packed, flat),
                old_values_BT=padded(packed, old_values, np.float32),
                returns_BT=padded(packed, returns, np.float32),
                mask_BT=padded(packed, batch.response_mask, np.bool_),
            )
            with torch.autocast(flat.device.type, enabled=False):
                return loss(inputs, totals)

        report = self._steps.train(batch, of_pack, fence=fence)
        return {
            **{f"critic_{name}": value for name, value in report.metrics.items()},
            "critic_value_loss": report.loss,
            "critic_grad_norm": report.grad_norm,
            "critic_learning_rate": report.learning_rate,
        }

    def skip(self) -> None:
        """Count a batch that nothing is trained on."""
        self._steps.skip()

    def save(self, folder: Path) -> None:
        """Write weights, optimizer, schedule and random state so that `load` continues bit for bit."""
        self._steps.save(folder)

    def load(self, folder: Path) -> None:
        """Take over what `save` wrote. Raises UserError naming what does not fit."""
        self._steps.load(folder)


class _ValueModel(torch.nn.Module):
    """A pack -> float32 [M]: the value of the state that each of its targets is drawn from."""

    def __init__(self, language_model: PreTrainedModel) -> None:
        super().__init__()
        self.backbone = language_model.base_model
        self.head = torch.nn.Linear(language_model.config.get_text_config().hidden_size, 1)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, packed: Pack) -> torch.Tensor:
        hidden_ME = response_hidden(self.backbone, packed)
        with torch.autocast(hidden_ME.device.type, enabled=False):
            return self.head(hidden_ME.float())[:, 0]


def _take_over_head(head: torch.nn.Linear, folder: Path) -> None:
    """Fill `head` with the folder's classification head, where that has one label and the same width."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights, torch.no_grad():
            names = set(weights.keys())
            for name in HEAD_NAMES:
                if f"{name}.weight" not in names:
                    continue
                weight = weights.get_tensor(f"{name}.weight")
                if weight.shape == head.weight.shape:
                    head.weight.copy_(weight)
                    if f"{name}.bias" in names:
                        head.bias.copy_(weights.get_tensor(f"{name}.bias"))
                    return
