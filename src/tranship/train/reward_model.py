"""A reward model: a sequence classifier of one label that scores token ids as the policy sampled them.

Nothing is decoded and encoded again, so its tokens must be the policy's: `check_same_tokens`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from tranship.models.tokenizer import load_tokenizer
from tranship.train.model_folder import check_complete, first_line, quiet_loading
from tranship.train.precision import products
from tranship.types import UserError


class RewardModel:
    """A model folder with weights in `dtype` (bf16 halves its memory) on the device, for inference alone.

    batch_tokens: most tokens of one forward pass, padding included; a longer sample still goes alone. Raises UserError
    if the folder does not load, has not exactly one label, or lacks the weights of its head.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        device: str,
        batch_tokens: int,
        dtype: Literal["fp32", "bf16"] = "fp32",
        trust_remote_code: bool = False,
    ) -> None:
        self._model_dir = model_dir
        self._device = torch.device(device)
        self._batch_tokens = batch_tokens
        self._dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
        self._model = _load(model_dir, self._dtype, trust_remote_code).to(self._device)
        self._head = _head(self._model, model_dir)
        self._context: int | None = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)

    def scores(
        self, prompts: Sequence[np.ndarray], group_of: np.ndarray, responses: Sequence[np.ndarray]
    ) -> np.ndarray:
        """float32 [N]: the label's logit at the last token of each prompt + response (int32 ids, as they are).

        A score does not depend on the samples that it is computed with. Raises UserError for a sample that is longer
        than the model's context.
        """
        rows = [np.concatenate([prompts[group], r]) for group, r in zip(group_of, responses, strict=True)]
        longest = max(map(len, rows), default=0)
        if self._context is not None and longest > self._context:
            raise UserError(
                f"a prompt with its response has {longest} tokens, and the reward model {self._model_dir} reads "
                f"{self._context}: lower data.max_prompt_tokens or rollout.max_response_tokens, or use another model"
            )
        result = np.zeros(len(rows), dtype=np.float32)
        with torch.inference_mode(), products(self._device, torch.float32):
            for chosen in _batches([len(row) for row in rows], self._batch_tokens):
                result[chosen] = self._score([rows[row] for row in chosen]).cpu().numpy()
        return result

    def _score(self, rows: Sequence[np.ndarray]) -> torch.Tensor:
        """float32 [B]; padded on the right, so that each token keeps its position."""
        lengths = torch.tensor([len(row) for row in rows])
        tokens = np.zeros((len(rows), int(lengths.max())), dtype=np.int64)
        for place, row in enumerate(rows):
            tokens[place, : len(row)] = row
        attended = torch.arange(tokens.shape[1])[None] < lengths[:, None]
        hidden = self._model.base_model(
            input_ids=torch.from_numpy(tokens).to(self._device),
            attention_mask=attended.long().to(self._device),
            use_cache=False,
        ).last_hidden_state
        # The classifier's own forward looks for the last token that is not the padding id, which may be a real one.
        last = hidden[torch.arange(len(rows), device=self._device), (lengths - 1).to(self._device)].float()
        bias = None if self._head.bias is None else self._head.bias.float()
        return torch.nn.functional.linear(last, self._head.weight.float(), bias)[:, 0]


def check_same_tokens(policy_dir: Path, model_dir: Path, trust_remote_code: bool = False) -> None:
    """UserError unless the model in model_dir reads the policy's token ids as the policy means them.

    Compared are all tokens with their ids, the ids of the begin and the end of text, and that the embedding has a
    row for each id that the policy can sample. Padding may differ: it is masked.
    """
    policy, model = (_tokenizer(folder, trust_remote_code) for folder in (policy_dir, model_dir))
    difference = _difference(policy, model)
    if difference is None:
        sizes = [_config(folder, trust_remote_code).get_text_config().vocab_size for folder in (policy_dir, model_dir)]
        if sizes[1] < sizes[0]:
            difference = f"it embeds {sizes[1]} ids, and the policy samples from {sizes[0]}"
    if difference is not None:
        raise UserError(
            f"{model_dir} does not read the tokens of the policy {policy_dir}: {difference}; responses are passed on "
            "as token ids and never decoded and encoded again: use a model with the policy's tokenizer"
        )


def _difference(policy: Tokenizer, model: Tokenizer) -> str | None:
    ours, theirs = policy.get_vocab(), model.get_vocab()
    if len(ours) != len(theirs):
        return f"its tokenizer has {len(theirs)} tokens, and the policy's {len(ours)}"
    for token, number in sorted(ours.items(), key=lambda item: item[1]):
        if theirs.get(token) != number:
            return f"token {token!r} is {theirs.get(token, 'unknown')} there, and {number} in the policy"
    for name in ("bos_token_id", "eos_token_id"):
        here, there = getattr(policy, name), getattr(model, name)
        if here != there:
            return f"its {name} is {there}, and the policy's {here}"
    return None


def _tokenizer(folder: Path, trust_remote_code: bool) -> Tokenizer:
    try:
        return load_tokenizer(folder, trust_remote_code)
    except UserError as error:
        raise UserError(str(error).removeprefix("model.path: ")) from error


def _config(model_dir: Path, trust_remote_code: bool) -> PreTrainedConfig:
    if not (model_dir / "config.json").is_file():
        raise UserError(f"{model_dir} is no Hugging Face model folder: it has no config.json")
    try:
        return AutoConfig.from_pretrained(model_dir, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(f"{model_dir}/config.json is not usable: {first_line(error)}: check the file") from error


def check_one_label(model_dir: Path, trust_remote_code: bool = False) -> None:
    """Raise UserError unless the folder's model gives one number, as its configuration says."""
    num_labels = _config(model_dir, trust_remote_code).num_labels
    if num_labels != 1:
        raise UserError(
            f"{model_dir} has {num_labels} labels, and a reward model has one: use a sequence classification model "
            "whose config.json has a single entry in id2label"
        )


def _load(model_dir: Path, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    check_one_label(model_dir, trust_remote_code)
    try:
        with quiet_loading():
            model, info = _from_pretrained(model_dir, dtype, trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise UserError(f"{model_dir} does not load as a sequence classifier: {first_line(error)}") from error
    check_complete(model_dir, info["missing_keys"])
    return model.eval()


def _from_pretrained(model_dir: Path, dtype: torch.dtype, trust_remote_code: bool) -> tuple[PreTrainedModel, Any]:
    return AutoModelForSequenceClassification.from_pretrained(
        model_dir,
        dtype=dtype,
        attn_implementation="sdpa",
        trust_remote_code=trust_remote_code,
        local_files_only=True,
        output_loading_info=True,
    )


def _head(model: PreTrainedModel, model_dir: Path) -> torch.nn.Linear:
    head = getattr(model, "score", None)
    if not isinstance(head, torch.nn.Linear):
        raise UserError(
            f"{model_dir} ({type(model).__name__}) has no linear layer `score` over its last token: use a sequence "
            "classifier that was made from a causal language model"
        )
    return head


def _batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[np.ndarray]:
    """Rows (int64), longest first, in runs whose padded size is at most batch_tokens (or of one row)."""
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    start = 0
    while start < len(order):
        count = max(1, batch_tokens // max(1, lengths[order[start]]))
        yield order[start : start + count]
        start += count
