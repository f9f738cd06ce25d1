"""The way of weights into vLLM: a backend of ours for its weight transfer, which is handed tensors in this process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

BACKEND = "tranship"


@dataclass
class NoInit:
    """Nothing has to be agreed upon before the first update."""


@dataclass
class HandedWeights:
    """One update. weights: (Hugging Face name, tensor in the engine's dtype), read until the update is finished."""

    weights: list[tuple[str, torch.Tensor]]


def register_backend() -> None:
    """Make `BACKEND` known to vLLM, once per process."""
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    if BACKEND in WeightTransferEngineFactory._registry:
        return

    class HandOver(WeightTransferEngine):
        """Loads what it is handed as vLLM loads a folder: layer by layer, into the tensors that are in use."""

        init_info_cls = NoInit
        update_info_cls = HandedWeights

        def init_transfer_engine(self, init_info: NoInit) -> None:
            """Nothing to set up."""

        def start_weight_update(self) -> None:
            """Prepare every layer to be loaded again."""
            _forget_expert_kernels(self.model)
            initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: HandedWeights) -> None:
            """Load these tensors."""
            self.model.load_weights(update_info.weights)

        def finish_weight_update(self) -> None:
            """Finish the layers that are not finished yet."""
            finalize_layerwise_reload(self.model, self.model_config)
            _pack_heads_again(self.model)

        def shutdown(self) -> None:
            """Nothing is held."""

    WeightTransferEngineFactory.register_engine(BACKEND, HandOver)


def _forget_expert_kernels(model: Any) -> None:
    """Have the kernel of each layer of experts set up again. A CPU's packs the weights when it is set up, but vLLM sets
    it up once: later weights would be written, unpacked, over the packed ones."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _pack_heads_again(model: Any) -> None:
    """A tied head is loaded through the embedding, but a CPU's kernel has a packed copy of its own, of the weights that
    were there before."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
