"""A data source becomes tokenised prompts; what is too long is refused or counted, never cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tranship.config.schema import DataConfig, DataSourceConfig
from tranship.data.chat import PromptEncoder
from tranship.data.rows import Row
from tranship.data.sources import load_rows
from tranship.types import Prompt, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHOWN = 3


@dataclass(frozen=True)
class PromptSet:
    """The prompts of a source. Prompt.index is the row's number in the source, from 0.

    dropped: (row number, reason) of rows that were left out. notes: what a person should know about the rows.
    """

    prompts: list[Prompt]
    dropped: list[tuple[int, str]]
    notes: tuple[str, ...] = ()


def load_prompts(source: DataSourceConfig, tokenizer: PreTrainedTokenizerBase, *, data: DataConfig) -> PromptSet:
    """Read, check and tokenise a source. Raises UserError naming file, row and column of what is wrong.

    Prompts of more than data.max_prompt_tokens are refused with their rows and lengths, or dropped and listed,
    by data.too_long.
    """
    encoder = PromptEncoder(tokenizer, data.system_prompt, data.template_args)
    rows = load_rows(source)
    prompts = [_prompt(index, row, encoder, tokenizer) for index, row in enumerate(rows)]
    limit = data.max_prompt_tokens
    too_long = [prompt for prompt in prompts if len(prompt.token_ids) > limit]
    if too_long and (data.too_long == "refuse" or len(too_long) == len(prompts)):
        raise UserError(_too_long_message(source.source, too_long, len(prompts), limit))
    return PromptSet(
        prompts=[prompt for prompt in prompts if len(prompt.token_ids) <= limit],
        dropped=[(prompt.index, f"{len(prompt.token_ids)} prompt tokens, over {limit}") for prompt in too_long],
        notes=_notes(rows, encoder),
    )


def _prompt(index: int, row: Row, encoder: PromptEncoder, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    try:
        ids = encoder.encode(row.prompt)
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
        data_source=row.data_source,
        ground_truth=row.ground_truth,
        ability=row.ability,
        extra_info=row.extra_info,
    )


def _too_long_message(name: str, too_long: list[Prompt], total: int, limit: int) -> str:
    first = ", ".join(f"row {prompt.index} ({len(prompt.token_ids)} tokens)" for prompt in too_long[:_SHOWN])
    longest = max(len(prompt.token_ids) for prompt in too_long)
    remedy = f"raise data.max_prompt_tokens (to {longest})"
    if len(too_long) < total:
        remedy += ", or set data.too_long=drop"
    return f"data source {name}: {len(too_long)} of {total} prompts exceed {limit} tokens, first {first}: {remedy}"


def _notes(rows: list[Row], encoder: PromptEncoder) -> tuple[str, ...]:
    marked = [row for row in rows if isinstance(row.prompt, str) and encoder.has_special_text(row.prompt)]
    if not marked:
        return ()
    return (
        f"{len(marked)} plain prompts (first: {marked[0].where}) hold text of special tokens, which is encoded as "
        "plain text: to have a chat template, give prompts as messages",
    )
