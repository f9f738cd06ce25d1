"""Data sources become tokenised prompts; what is too long is refused or counted, never cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tranship.config.schema import DataConfig, DataSourceConfig, MixturePartConfig
from tranship.data.chat import PromptEncoder
from tranship.data.promptset import Dropped, PromptPart, PromptSet, prompt_digest
from tranship.data.recorded import encode_recorded
from tranship.data.rows import Row
from tranship.data.sources import load_rows
from tranship.types import Prompt, Recorded, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RecordedKind = Literal["demonstration", "preference"]

_SHOWN = 3
_COLUMNS = {
    "demonstration": "give demonstrations as a column messages that ends with the assistant's, or as prompt and "
    "completion (the source sums: args.recorded=demonstration)",
    "preference": "give preferences as columns chosen and rejected, and a prompt where they do not hold it (the source "
    "sums: args.recorded=preference)",
}


def load_prompts(
    source: DataSourceConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    data: DataConfig,
    recorded: RecordedKind | None = None,
    context_length: int | None = None,
    tools: tuple[dict[str, Any], ...] = (),
) -> PromptSet:
    """Read, check and tokenise a source or a mixture. Raises UserError naming file, row and column of what is wrong.

    recorded: the responses that each row must bring, into Prompt.recorded (one demonstration, or chosen and rejected);
    None: those that rows bring are left out, and noted. Prompts of more than data.max_prompt_tokens, and prompts with
    a recorded response of more than data.max_tokens (null: context_length, the model's, where given), are refused with
    their rows and lengths, or dropped and listed, by data.too_long. A preference whose two responses are the same is
    dropped: nothing can be learned from it. tools: of an environment, JSON schemas for rows that bring none.
    """
    encoder = PromptEncoder(tokenizer, data.system_prompt, data.template_args)
    limits = _Limits(data.max_prompt_tokens, data.max_tokens or context_length, data.too_long)
    prompts: list[Prompt] = []
    dropped: list[Dropped] = []
    notes: list[str] = []
    parts: list[PromptPart] = []
    duplicates = num_rows = 0
    for part in _parts(source):
        rows = [replace(row, tools=row.tools or tools) for row in load_rows(part)] if tools else load_rows(part)
        found = [_prompt(num_rows + number, row, part, encoder, tokenizer, recorded) for number, row in enumerate(rows)]
        kept, left_out = _sift(part.source, rows, found, limits)
        seen = len(kept) - len({prompt_digest(prompt) for prompt in kept})
        notes += _notes(part.source, rows, kept, seen, encoder, tokenizer, recorded)
        parts.append(PromptPart(part.source, len(prompts), len(prompts) + len(kept), len(rows), part.weight))
        prompts += kept
        dropped += left_out
        duplicates += seen
        num_rows += len(rows)
    if encoder.reads_clock and any(prompt.messages for prompt in prompts):
        notes.append(
            "the chat template writes today's date into each prompt, so that the same run has other prompts tomorrow: "
            "set it by data.template_args (many templates read date_string)"
        )
    return PromptSet(prompts, dropped, tuple(notes), tuple(parts), duplicates)


@dataclass(frozen=True)
class _Limits:
    prompt: int
    whole: int | None
    too_long: Literal["refuse", "drop"]


def _parts(source: DataSourceConfig) -> tuple[MixturePartConfig, ...]:
    if source.source is None:
        return source.mixture
    return (MixturePartConfig(source=source.source, args=source.args, limit=source.limit),)


def _prompt(
    index: int,
    row: Row,
    part: MixturePartConfig,
    encoder: PromptEncoder,
    tokenizer: PreTrainedTokenizerBase,
    recorded: RecordedKind | None,
) -> Prompt:
    try:
        ids = encoder.encode(row.prompt, row.tools)
        responses = _recorded(row, ids, encoder, tokenizer, recorded)
    except UserError as error:
        raise UserError(f"{row.where}: {error}") from error
    if not len(ids):
        raise UserError(f"{row.where}: the prompt has no tokens")
    text = tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False)
    assert isinstance(text, str), text
    return Prompt(
        index=index,
        token_ids=ids,
        text=text,
        data_source=part.name or row.data_source,
        ground_truth=row.ground_truth,
        ability=row.ability,
        extra_info=row.extra_info,
        recorded=responses,
        messages=() if isinstance(row.prompt, str) else tuple(encoder.conversation(row.prompt)),
        tools=row.tools,
    )


def _recorded(
    row: Row,
    prompt_ids: np.ndarray,
    encoder: PromptEncoder,
    tokenizer: PreTrainedTokenizerBase,
    kind: RecordedKind | None,
) -> tuple[Recorded, ...]:
    if kind is None:
        return ()
    wanted = 2 if kind == "preference" else 1
    if len(row.responses) != wanted:
        raise UserError(f"the row has {len(row.responses)} recorded responses, not {wanted}: {_COLUMNS[kind]}")
    return tuple(
        encode_recorded(encoder, tokenizer, row.prompt, response, row.tools, prompt_ids) for response in row.responses
    )


def _sift(
    name: str, rows: Sequence[Row], prompts: Sequence[Prompt], limits: _Limits
) -> tuple[list[Prompt], list[Dropped]]:
    """The prompts to use, and what is left out. Raises UserError for what is too long, or where nothing is left."""
    too_long = [prompt for prompt in prompts if len(prompt.token_ids) > limits.prompt]
    if too_long and (limits.too_long == "refuse" or len(too_long) == len(prompts)):
        lengths = [len(prompt.token_ids) for prompt in too_long]
        _refuse(name, "prompts", "data.max_prompt_tokens", limits.prompt, too_long, lengths, len(prompts))
    reasons = {p.index: f"prompt too long: {len(p.token_ids)} prompt tokens, over {limits.prompt}" for p in too_long}
    rest = [prompt for prompt in prompts if prompt.index not in reasons]
    if limits.whole is not None:
        too_long = [prompt for prompt in rest if _longest(prompt) > limits.whole]
        if too_long and (limits.too_long == "refuse" or len(too_long) == len(rest)):
            lengths = [_longest(prompt) for prompt in too_long]
            _refuse(name, "prompts with their responses", "data.max_tokens", limits.whole, too_long, lengths, len(rest))
        reasons |= {p.index: f"response too long: {_longest(p)} tokens in all, over {limits.whole}" for p in too_long}
    reasons |= {p.index: "chosen and rejected are the same" for p in rest if _no_preference(p)}
    if len(reasons) == len(prompts):
        raise UserError(f"data source {name}: no row is left of {len(prompts)}, first: {reasons[prompts[0].index]}")
    dropped = [
        Dropped(prompt.index, row.where, reasons[prompt.index])
        for prompt, row in zip(prompts, rows, strict=True)
        if prompt.index in reasons
    ]
    return [prompt for prompt in prompts if prompt.index not in reasons], dropped


def _longest(prompt: Prompt) -> int:
    """Tokens of the prompt with its longest recorded response; 0 where it has none."""
    return max((len(prompt.token_ids) + len(response.token_ids) for response in prompt.recorded), default=0)


def _no_preference(prompt: Prompt) -> bool:
    responses = [response.token_ids.tolist() for response in prompt.recorded]
    return len(responses) == 2 and responses[0] == responses[1]


def _refuse(
    name: str, what: str, key: str, limit: int, too_long: Sequence[Prompt], lengths: Sequence[int], total: int
) -> None:
    shown = zip(too_long[:_SHOWN], lengths, strict=False)
    first = ", ".join(f"row {prompt.index} ({length} tokens)" for prompt, length in shown)
    remedy = f"raise {key} (to {max(lengths)})"
    if len(too_long) < total:
        remedy += ", or set data.too_long=drop"
    raise UserError(
        f"data source {name}: {len(too_long)} of {total} {what} exceed {limit} tokens, first {first}: {remedy}"
    )


def _notes(
    name: str,
    rows: Sequence[Row],
    prompts: Sequence[Prompt],
    duplicates: int,
    encoder: PromptEncoder,
    tokenizer: PreTrainedTokenizerBase,
    recorded: RecordedKind | None,
) -> list[str]:
    notes = []
    marked = [row for row in rows if isinstance(row.prompt, str) and encoder.has_special_text(row.prompt)]
    if marked:
        notes.append(
            f"{len(marked)} plain prompts (first: {marked[0].where}) hold text of special tokens, which is encoded as "
            "plain text: to have a chat template, give prompts as messages"
        )
    if duplicates:
        notes.append(f"{name}: {duplicates} of {len(prompts)} prompts have the tokens of an earlier one (they stay)")
    if left_out := sorted({column for row in rows for column in row.left_out}):
        notes.append(f"{name}: columns {', '.join(left_out)} have no JSON form and are left out")
    if recorded is None and (bring := sum(1 for row in rows if row.responses)):
        notes.append(f"{name}: {bring} rows bring recorded responses, which are not used here")
    empty = sum(1 for prompt in prompts for response in prompt.recorded if response.mask.sum() <= 1)
    if empty:
        notes.append(f"{name}: {empty} recorded responses are empty, but for the token that ends them")
    ends = {int(response.token_ids[-1]) for prompt in prompts for response in prompt.recorded}
    if other := sorted(ends - {tokenizer.eos_token_id}):
        said = ", ".join(f"{tokenizer.convert_ids_to_tokens(token)!r} ({token})" for token in other)
        notes.append(
            f"{name}: recorded turns end with {said}, which is not the tokenizer's end-of-text token "
            f"({tokenizer.eos_token_id}): see that responses end there too (rollout.stop_token_ids)"
        )
    return notes
