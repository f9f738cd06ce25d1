"""Prompts of requests as token ids, and how many tokens may follow them."""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from tranship.data.chat import PromptEncoder
from tranship.data.messages import to_messages
from tranship.serve.errors import ApiError, too_long
from tranship.serve.requests import MOST_SAMPLES, ChatRequest, CompletionRequest
from tranship.types import UserError

COMPLETION_TOKENS = 16
"""What OpenAI documents for completions that name no max_tokens."""


class Prompts:
    """Encodes prompts with one tokenizer, and refuses those that do not fit in `max_tokens` with their responses."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._encoder = PromptEncoder(tokenizer)

    def of_completion(self, asked: CompletionRequest) -> tuple[list[np.ndarray], int]:
        """(token ids int32 [P] of each prompt, most tokens of a response). Raises ApiError."""
        cap = asked.max_tokens or COMPLETION_TOKENS
        prompts = [self._ids(prompt, asked.add_special_tokens) for prompt in asked.prompts]
        if not prompts or not all(len(ids) for ids in prompts):
            message = "there is no prompt, or one without a token: give text or token ids"
            raise ApiError(400, message, param="prompt", code="invalid_value")
        if len(prompts) * asked.num_samples > MOST_SAMPLES:
            message = (
                f"{len(prompts)} prompts x n={asked.num_samples} are more than {MOST_SAMPLES} samples: ask for less"
            )
            raise ApiError(400, message, param="n", code="invalid_value")
        longest = max(len(ids) for ids in prompts)
        if longest + cap > self._max_tokens:
            raise too_long(longest, cap, self._max_tokens, "max_tokens")
        return prompts, cap

    def of_chat(self, asked: ChatRequest) -> tuple[np.ndarray, int]:
        """(token ids int32 [P] of the conversation, most tokens of the response). Raises ApiError."""
        encoder = self._encoder
        try:
            if asked.chat_template_kwargs:
                encoder = PromptEncoder(self._tokenizer, template_args=asked.chat_template_kwargs)
            messages = to_messages([with_text(message) for message in asked.messages], "messages", "the request")
            ids = encoder.encode(messages, asked.offered_tools)
        except UserError as error:
            raise ApiError(400, str(error), param="messages", code="invalid_value") from error
        cap = self._max_tokens - len(ids) if asked.cap is None else asked.cap
        if cap < 1 or len(ids) + cap > self._max_tokens:
            name = "max_tokens" if asked.max_completion_tokens is None else "max_completion_tokens"
            raise too_long(len(ids), max(cap, 1), self._max_tokens, name)
        return ids, cap

    def _ids(self, prompt: str | list[int], add_special_tokens: bool) -> np.ndarray:
        """Of a prompt as it is. Whoever writes special tokens in it means them: many tools apply templates themselves;
        in messages they stay text."""
        if isinstance(prompt, str):
            ids = self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens, split_special_tokens=False)
            return np.array(ids, np.int32)
        wrong = [token for token in prompt if not 0 <= token < 1 << 31]
        if wrong:
            message = f"token id {wrong[0]} is out of range"
            raise ApiError(400, message, param="prompt", code="invalid_value")
        return np.array(prompt, np.int32)


def with_text(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its content as one string, where it came as a list of parts of text."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ApiError(
                400,
                f"a part of a message is {kind!r}: only text is supported",
                param="messages",
                code="unsupported_parameter",
            )
        texts.append(part["text"])
    return {**message, "content": "".join(texts)}
