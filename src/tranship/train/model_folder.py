"""A Hugging Face folder to a model that runs packed, and back. A model that packing would change is refused at load."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import logging

from tranship.train.attention import ATTENTION
from tranship.train.head import token_logprobs, token_logprobs_and_entropy
from tranship.train.packing import Pack, pack, rows_by_prompt
from tranship.types import UserError

# What a tokenizer, its chat template and generation settings may be kept in. Weights and config are written anew.
COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates",
    "generation_config.json",
    "*.py",
    "LICENSE*",
)
PROBE_TOLERANCE = 1e-3


def load_model(
    model_dir: Path, device: torch.device, *, trust_remote_code: bool, need_head: bool = True
) -> PreTrainedModel:
    """The causal language model of a folder, in float32, on the device, with packed attention and without dropout.

    need_head False: the folder may lack the output head, which then is random. Raises UserError if the folder does not
    load or lacks other weights, or if packed log-probs differ from plain ones (recurrent layers, scaled or capped
    logits): such a model would train on other numbers than it samples with.
    """
    if not (model_dir / "config.json").is_file():
        raise UserError(f"{model_dir} is no Hugging Face model folder: it has no config.json")
    try:
        with quiet_loading():
            model, info = AutoModelForCausalLM.from_pretrained(
                model_dir,
                dtype=torch.float32,
                attn_implementation="sdpa",
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(f"{model_dir} does not load as a causal language model: {first_line(error)}") from error
    head = model.get_output_embeddings()
    optional = {name for name, p in model.named_parameters() if not need_head and p is getattr(head, "weight", None)}
    check_complete(model_dir, set(info["missing_keys"]) - optional)
    model.to(device)
    model.eval()
    _check_packing(model, model_dir)
    return model


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Keep one activation per layer and compute the others again in the backward pass.

    That needs training mode; dropout stays off in it, or trainer and sampler would disagree.
    """
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            setattr(module, "attention_dropout", 0.0)  # noqa: B010
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def response_hidden(backbone: torch.nn.Module, packed: Pack) -> torch.Tensor:
    """[M, E]: last hidden states of the tokens that predict the pack's targets (under the caller's autocast)."""
    hidden = backbone(
        input_ids=packed.token_ids,
        position_ids=packed.position_ids,
        use_cache=False,
        packed_index=packed.attention,
    ).last_hidden_state
    return hidden[0].index_select(0, packed.source)


def response_logprobs(model: PreTrainedModel, packed: Pack, *, temperature: float, dtype: torch.dtype) -> torch.Tensor:
    """float32 [M]: log-probs of the pack's targets; products in dtype (under the caller's autocast)."""
    hidden, head = response_hidden(model.base_model, packed), _output_head(model)
    return token_logprobs(hidden, head.weight, head.bias, packed.target, temperature=temperature, dtype=dtype)


def response_logprobs_and_entropy(
    model: PreTrainedModel, packed: Pack, *, temperature: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(what response_logprobs gives, float32 [M]: entropies of the distributions that the targets are drawn from)."""
    hidden, head = response_hidden(model.base_model, packed), _output_head(model)
    return token_logprobs_and_entropy(
        hidden, head.weight, head.bias, packed.target, temperature=temperature, dtype=dtype
    )


def export_model(model: PreTrainedModel, model_dir: Path, folder: Path) -> None:
    """Write weights and config of `model`, and copy what else model_dir holds for users of the model."""
    folder.mkdir(parents=True, exist_ok=True)
    generation = model.generation_config
    if (model_dir / "generation_config.json").is_file():
        # It is copied below, as it is; transformers would refuse to write settings that contradict each other.
        model.generation_config = GenerationConfig()
    try:
        with quiet_loading():
            model.save_pretrained(folder)
    finally:
        model.generation_config = generation
    for pattern in COMPANIONS:
        for source in model_dir.glob(pattern):
            if source.is_dir():
                shutil.copytree(source, folder / source.name, dirs_exist_ok=True)
            else:
                shutil.copyfile(source, folder / source.name)


def _output_head(model: PreTrainedModel) -> torch.nn.Linear:
    head = model.get_output_embeddings()
    assert isinstance(head, torch.nn.Linear), type(head)
    return head


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Inside, transformers draws no bars and no report over the console; the process keeps its settings."""
    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()


def check_complete(model_dir: Path, missing: Collection[str]) -> None:
    """UserError if weights are missing in the folder; transformers would fill them with random numbers."""
    if missing:
        raise UserError(
            f"{model_dir} lacks {len(missing)} weight(s) of its model, the first is {min(missing)}: "
            "fetch it again, or use another model"
        )


def first_line(error: Exception) -> str:
    """The first line of what the error says, or its kind."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _check_packing(model: PreTrainedModel, model_dir: Path) -> None:
    """Compare two packed groups with each row run alone, by transformers' own attention and logits."""
    vocabulary = model.config.get_text_config().vocab_size
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, vocabulary, size, dtype=np.int32) for size in (5, 3)]
    responses = [generator.integers(0, vocabulary, size, dtype=np.int32) for size in (4, 2, 3)]
    group_of = np.array([0, 1, 1])
    device = model.device
    packed = pack(rows_by_prompt(2, group_of), prompts, responses, wanted=None, device=device)
    with torch.no_grad():
        plain = []
        for group, response in zip(group_of, responses, strict=True):
            tokens = torch.from_numpy(np.concatenate([prompts[group], response]).astype(np.int64)).to(device)
            logits = model(input_ids=tokens[None], use_cache=False).logits[0, len(prompts[group]) - 1 : -1]
            plain.append(logits.float().log_softmax(-1).gather(1, tokens[len(prompts[group]) :, None])[:, 0])
        try:
            model.set_attn_implementation(ATTENTION)
            seen = response_logprobs(model, packed, temperature=1.0, dtype=torch.float32)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"{model_dir} ({type(model).__name__}) does not run packed: {error}") from error
    gap = float((seen - torch.cat(plain)).abs().max())
    if not gap <= PROBE_TOLERANCE:
        raise UserError(
            f"{model_dir} ({type(model).__name__}): packed log-probs differ from plain ones by {gap:.2g}; "
            "models with recurrent layers or scaled logits are not supported"
        )
