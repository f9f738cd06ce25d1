"""Tokenizers of model folders: loading, saving, and the text of responses (token ids are the truth, text a view)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import jinja2
import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tranship.types import UserError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def load_tokenizer(path: Path | str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder. Raises UserError where the folder has none or it does not load."""
    folder = Path(path)
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise UserError(
            f"model.path: {folder} has no tokenizer (no tokenizer.json): copy the model's tokenizer files there"
        )
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:
        first_line = (str(error).strip().splitlines() or [""])[0]
        raise UserError(
            f"model.path: the tokenizer of {folder} does not load ({type(error).__name__}: {first_line}): check its "
            "tokenizer files, or set model.trust_remote_code if it brings its own code"
        ) from error


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a tokenizer so that any transformers version of the last years loads it (the class name is the old one)."""
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings.pop("backend", None)
    file.write_text(json.dumps(settings, indent=2) + "\n")


def template_system_prompt(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The system prompt that the chat template adds where messages have none; None if it adds none.

    Example: SmolLM2's "You are a helpful AI assistant named SmolLM, trained by Hugging Face".
    """
    if not tokenizer.chat_template:
        return None
    user = {"role": "user", "content": "qzuserqz"}
    try:
        given = _render(tokenizer, [{"role": "system", "content": "qzsystemqz"}, user])
    except (jinja2.TemplateError, TypeError):
        return None  # The template has no system messages.
    before, found, after = given.partition("qzsystemqz")
    plain = _render(tokenizer, [user])
    same_frame = plain.startswith(before) and plain.endswith(after) and len(plain) >= len(before) + len(after)
    if not found or not same_frame:
        return None
    return plain[len(before) : len(plain) - len(after)]


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str), text
    return text


def decode_response(tokenizer: PreTrainedTokenizerBase, token_ids: np.ndarray | Sequence[int]) -> str:
    """A response's text as rewards and people see it: special tokens (the end-of-text one too) are left out.

    Spaces are kept as they were sampled (no clean-up), so equal ids give equal text everywhere.
    """
    ids = [int(token) for token in token_ids]
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str), text
    return text
