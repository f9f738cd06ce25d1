"""A tokenizer's special tokens, and text in which only the template's own parts may hold them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SpecialTokens:
    """of: text of each special token -> its id. pattern: matches the text of any of them, the longest first."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.of: Mapping[str, int] = {
            token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        longest_first = sorted(self.of, key=lambda text: len(text), reverse=True)
        self.pattern = re.compile("|".join([re.escape(text) for text in longest_first]) or r"(?!)")

    def plain(self, text: str) -> list[int]:
        """Ids of text as the plain text that it is, whatever it looks like."""
        if not text:
            return []
        return cast(list[int], self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))

    def ids(self, parts: Iterable[tuple[str, bool]]) -> list[int]:
        """Ids of (text, whether it is the template's) parts in turn.

        Special tokens are recognised in the template's parts alone; the text between two of them, from template and
        content together, is encoded at once.
        """
        ids: list[int] = []
        run = ""
        for part, is_template in parts:
            first, *texts = self.pattern.split(part) if is_template else [part]
            run += first
            for special, text in zip(self.pattern.findall(part) if is_template else [], texts, strict=True):
                ids += [*self.plain(run), self.of[special]]
                run = text
        return ids + self.plain(run)
