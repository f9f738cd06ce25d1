"""Model folders: where one lies, and what is in it, before any weight is loaded."""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from tranship.models.cache import model_folder
from tranship.models.catalog import CATALOG
from tranship.models.tokenizer import load_tokenizer
from tranship.types import UserError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]
_HUB_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class ModelInfo:
    """What a folder says of its model.

    eos_token_ids: every id that ends a response, sorted: those of the config, the generation settings and the
    tokenizer. num_parameters: elements of the weights, a tied one counted once. tied: the head is the embedding.
    """

    path: Path
    architecture: str
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    num_parameters: int
    tied: bool


def locate(path_or_name: str) -> Path:
    """The folder that `model.path` means: a folder, a fetched model of the catalog, or one of the Hugging Face hub.

    Hub names are downloaded into huggingface_hub's cache. Raises UserError within seconds where there is nothing.
    """
    folder = Path(path_or_name).expanduser()
    if folder.is_dir():
        return folder
    if path_or_name in CATALOG:
        fetched = model_folder(path_or_name)
        if not fetched.is_dir():
            raise UserError(f"model.path: {path_or_name} is not fetched yet: run: tranship model get {path_or_name}")
        return fetched
    if folder.exists() or not _HUB_NAME.fullmatch(path_or_name):
        raise UserError(f"model.path: there is no folder {folder}: give a Hugging Face folder, or one of: {_names()}")
    return _from_hub(path_or_name)


def check(path: Path, need_chat_template: bool, trust_remote_code: bool = False) -> ModelInfo:
    """Read a folder's config, tokenizer and weight headers (no weights).

    Raises UserError naming what is missing or does not fit: the folder, config.json, weights in safetensors, the
    tokenizer, its chat template (where `need_chat_template`), an end-of-text id.
    """
    if not path.is_dir():
        raise UserError(f"model.path: there is no folder {path}: check the path, or run: tranship model get NAME")
    config = _config(path, trust_remote_code)
    tokenizer = load_tokenizer(path, trust_remote_code)
    if need_chat_template and not tokenizer.chat_template:
        raise UserError(
            f"model.path: the tokenizer of {path} has no chat template, and the prompts are messages: use an instruct "
            "model, add a chat_template.jinja to the folder, or give prompts as plain strings"
        )
    text_config: Any = config.get_text_config()
    if len(tokenizer) > text_config.vocab_size:
        raise UserError(
            f"model.path: the tokenizer of {path} has {len(tokenizer)} tokens, the model only "
            f"{text_config.vocab_size}: they do not belong together"
        )
    tied = bool(getattr(text_config, "tie_word_embeddings", False))
    return ModelInfo(
        path=path,
        architecture=(config.architectures or [type(config).__name__])[0],
        vocab_size=int(text_config.vocab_size),
        context_length=_context_length(path, text_config),
        eos_token_ids=_eos_token_ids(path, text_config, tokenizer),
        pad_token_id=_pad_token_id(text_config, tokenizer),
        num_parameters=_num_parameters(path, tied),
        tied=tied,
    )


def _names() -> str:
    return ", ".join(sorted(CATALOG))


def _from_hub(name: str) -> Path:
    try:
        # One question with a limit first: the download itself would wait for a silent network without end.
        revision = HfApi().model_info(name, timeout=_HUB_TIMEOUT_S).sha
    except Exception as error:  # The HTTP library's own kinds of errors differ by version.
        return _from_hub_cache(name, _first_line(error))
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_HUB_FILES))
    except Exception as error:
        raise UserError(
            f"model.path: downloading {name} from the Hugging Face hub failed ({_first_line(error)}): try again (it "
            "goes on where it stopped), or check that the disk has room"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _from_hub_cache(name: str, cause: str) -> Path:
    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES, local_files_only=True))
    except (OSError, ValueError) as error:
        near = difflib.get_close_matches(name, CATALOG, n=1)
        hint = f"did you mean {near[0]}? otherwise " if near else ""
        raise UserError(
            f"model.path: there is no folder {name!r}, and the Hugging Face hub did not give it ({cause}): {hint}check "
            f"the name and the network, give a folder, or use one of: {_names()}"
        ) from error


def _config(path: Path, trust_remote_code: bool) -> PreTrainedConfig:
    if not (path / "config.json").is_file():
        raise UserError(f"model.path: {path} has no config.json: give the folder of a Hugging Face model")
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:
        raise UserError(
            f"model.path: {path}/config.json is not usable ({type(error).__name__}: {_first_line(error)}): check the "
            "file, or set model.trust_remote_code if the model brings its own code"
        ) from error


def _context_length(path: Path, text_config: Any) -> int:
    length = getattr(text_config, "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1:
        raise UserError(f"model.path: {path}/config.json has no max_position_embeddings: add the context length")
    return length


def _pad_token_id(text_config: Any, tokenizer: Any) -> int | None:
    return text_config.pad_token_id if text_config.pad_token_id is not None else tokenizer.pad_token_id


def _eos_token_ids(path: Path, text_config: Any, tokenizer: Any) -> tuple[int, ...]:
    found = [text_config.eos_token_id, tokenizer.eos_token_id]
    if (path / "generation_config.json").is_file():
        found.append(GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id)
    ids: set[int] = set()
    for entry in found:
        if entry is not None:
            ids.update(int(token) for token in (entry if isinstance(entry, list | tuple) else [entry]))
    if not ids:
        raise UserError(
            f"model.path: {path} names no end-of-text token: set eos_token_id in its config.json, or eos_token in its "
            "tokenizer_config.json"
        )
    return tuple(sorted(ids))


def _num_parameters(path: Path, tied: bool) -> int:
    total = 0
    for file in _weight_files(path):
        try:
            with safe_open(file, framework="np") as weights:
                for name in weights.keys():  # noqa: SIM118 (not a mapping)
                    if not (tied and name == "lm_head.weight"):
                        total += _size(weights.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"model.path: {file} is not a whole safetensors file ({error}): fetch it again (git lfs pull?)"
            ) from error
    return total


def _weight_files(path: Path) -> list[Path]:
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        has_bin = any(path.glob("pytorch_model*.bin"))
        remedy = "save it again with safetensors" if has_bin else "give a folder that holds a model's weights"
        raise UserError(f"model.path: {path} has no weights (model.safetensors): {remedy}")
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"model.path: {index} is not a list of weight files: fetch it again") from error
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        raise UserError(
            f"model.path: {len(missing)} of {len(names)} weight files are missing in {path}, the first is "
            f"{missing[0]}: fetch them"
        )
    return [path / name for name in names]


def _size(shape: list[int]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size
