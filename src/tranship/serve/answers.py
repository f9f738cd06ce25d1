"""Answers as OpenAI's clients read them: whole ones, and chunks of a stream.

Beside OpenAI's fields: policy_version (the oldest one that sampled a token of the answer or chunk), and, where
return_token_ids was asked for, prompt_token_ids and token_ids, as vLLM names and places them.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tranship.serve.desk import Part
from tranship.serve.text import Decode, GrowingText, TokenTexts
from tranship.serve.tool_calls import GrowingCalls


@dataclass
class Piece:
    """What one part adds to a choice. offsets: where each token's text begins in the text of the choice. calls: of
    tools, in OpenAI's form."""

    part: Part
    text: str
    offsets: list[int] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def finish_reason(self) -> str | None:
        """Why the choice ended; None: it goes on."""
        return "tool_calls" if self.calls and self.part.finish_reason == "stop" else self.part.finish_reason


class Choices:
    """The samples of one request as their parts come in. prompts: int32 [P] each, samples_each of every one.
    with_tools: calls of tools are read out of the texts."""

    def __init__(
        self,
        prompts: Sequence[np.ndarray],
        samples_each: int,
        decode: Decode,
        stop_strings: Sequence[str],
        with_tools: bool = False,
    ) -> None:
        self.prompts = prompts
        self.num = len(prompts) * samples_each
        self._samples_each = samples_each
        self._texts = [GrowingText(decode, stop_strings) for _ in range(self.num)]
        self._calls = [GrowingCalls() for _ in range(self.num if with_tools else 0)]
        self.num_tokens = 0
        self.num_done = 0

    def prompt_of(self, index: int) -> list[int]:
        """Token ids of a choice's prompt."""
        return self.prompts[index // self._samples_each].tolist()

    def accept(self, part: Part, offsets: bool = False) -> Piece:
        """Count a part and decode it. offsets: also say where each token begins."""
        last = part.finish_reason is not None
        self.num_tokens += len(part.token_ids)
        self.num_done += last
        text = self._texts[part.index]
        ids = part.token_ids.tolist()
        if not offsets:
            piece = Piece(part, text.push(ids, last))
            if self._calls:
                piece.text, piece.calls = self._calls[part.index].push(piece.text, last)
            return piece
        piece = Piece(part, "")
        for place, token in enumerate(ids):
            piece.offsets.append(text.length)
            piece.text += text.push([token], last and place == len(ids) - 1)
        if last and not ids:
            piece.text += text.push([], True)
        return piece

    def usage(self) -> dict[str, int]:
        """Counts of tokens; a prompt counts once, however many samples it has."""
        prompt = sum(len(ids) for ids in self.prompts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.num_tokens,
            "total_tokens": prompt + self.num_tokens,
        }


@dataclass(frozen=True)
class Style:
    """What differs between the two endpoints. want_logprobs, want_ids, want_offsets: what the request asked
    for."""

    model: str
    tokens: TokenTexts
    want_logprobs: bool
    want_ids: bool
    want_offsets: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    unique: str = field(default_factory=lambda: uuid.uuid4().hex)

    def head(self, kind: str, prefix: str, version: int) -> dict[str, Any]:
        """The fields that every answer begins with."""
        return {
            "id": f"{prefix}-{self.unique}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "policy_version": version,
        }


class CompletionStyle(Style):
    """Of /v1/completions."""

    def whole(self, pieces: Sequence[Piece], choices: Choices) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        return {
            **self.head("text_completion", "cmpl", oldest(pieces)),
            "choices": [self._choice(piece, choices, first=True) for piece in pieces],
            "usage": choices.usage(),
        }

    def begin(self, choices: Choices, version: int) -> Iterator[dict[str, Any]]:
        """Chunks before any token: none."""
        return iter(())

    def chunk(self, piece: Piece, choices: Choices, first: bool) -> dict[str, Any]:
        """What a part adds. first: it is the first of its choice."""
        return {
            **self.head("text_completion", "cmpl", oldest([piece])),
            "choices": [self._choice(piece, choices, first)],
        }

    def end(self, choices: Choices, version: int) -> dict[str, Any]:
        """The chunk with the counts."""
        return {**self.head("text_completion", "cmpl", version), "choices": [], "usage": choices.usage()}

    def _choice(self, piece: Piece, choices: Choices, first: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": piece.part.index,
            "text": piece.text,
            "logprobs": self._logprobs(piece) if self.want_logprobs else None,
            "finish_reason": piece.finish_reason,
        }
        if self.want_ids:
            choice["token_ids"] = piece.part.token_ids.tolist()
            if first:
                choice["prompt_token_ids"] = choices.prompt_of(piece.part.index)
        return choice

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        return {
            "tokens": [self.tokens.text(token) for token in piece.part.token_ids],
            "token_logprobs": piece.part.logprobs.tolist(),
            "top_logprobs": self._top(piece.part),
            "text_offset": piece.offsets,
        }

    def _top(self, part: Part) -> list[dict[str, float]] | None:
        """By text, likeliest first, and the sampled token is always among them. Of tokens with one text (parts of a
        character) the likeliest stands."""
        if part.top is None:
            return None
        places = []
        for token, logprob, other in zip(part.token_ids, part.logprobs, _likeliest(part), strict=True):
            texts: dict[str, float] = {}
            for each, value in [*other, (int(token), float(logprob))]:
                texts.setdefault(self.tokens.text(each), value)
            places.append(texts)
        return places


class ChatStyle(Style):
    """Of /v1/chat/completions."""

    def whole(self, pieces: Sequence[Piece], choices: Choices) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        answer = {
            **self.head("chat.completion", "chatcmpl", oldest(pieces)),
            "choices": [
                self._choice(piece, "message", {"role": "assistant", "refusal": None, **_said(piece)})
                for piece in pieces
            ],
            "usage": choices.usage(),
        }
        return answer | self._prompt_ids(choices)

    def begin(self, choices: Choices, version: int) -> Iterator[dict[str, Any]]:
        """One chunk a choice, with the role."""
        for index in range(choices.num):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            chunk = {**self.head("chat.completion.chunk", "chatcmpl", version), "choices": [choice]}
            yield chunk | (self._prompt_ids(choices) if index == 0 else {})

    def chunk(self, piece: Piece, choices: Choices, first: bool) -> dict[str, Any]:
        """What a part adds."""
        delta: dict[str, Any] = {"content": piece.text}
        if piece.calls:
            delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(piece.calls)]
        choice = self._choice(piece, "delta", delta)
        return {**self.head("chat.completion.chunk", "chatcmpl", oldest([piece])), "choices": [choice]}

    def end(self, choices: Choices, version: int) -> dict[str, Any]:
        """The chunk with the counts."""
        return {**self.head("chat.completion.chunk", "chatcmpl", version), "choices": [], "usage": choices.usage()}

    def _prompt_ids(self, choices: Choices) -> dict[str, Any]:
        return {"prompt_token_ids": choices.prompt_of(0)} if self.want_ids else {}

    def _choice(self, piece: Piece, name: str, said: dict[str, Any]) -> dict[str, Any]:
        choice = {
            "index": piece.part.index,
            name: said,
            "logprobs": self._logprobs(piece) if self.want_logprobs else None,
            "finish_reason": piece.finish_reason,
        }
        return choice | ({"token_ids": piece.part.token_ids.tolist()} if self.want_ids else {})

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        part = piece.part
        content = [
            self._token(int(token), float(logprob)) | {"top_logprobs": [self._token(*each) for each in other]}
            for token, logprob, other in zip(part.token_ids, part.logprobs, _likeliest(part), strict=True)
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.tokens.text(token), "logprob": logprob, "bytes": self.tokens.utf8(token)}


def _likeliest(part: Part) -> list[list[tuple[int, float]]]:
    """At each place the likeliest tokens and their log-probs; none where they were not asked for."""
    if part.top is None:
        return [[] for _ in part.token_ids]
    return [
        list(zip(ids, values, strict=True))
        for ids, values in zip(part.top.token_ids.tolist(), part.top.logprobs.tolist(), strict=True)
    ]


def _said(piece: Piece) -> dict[str, Any]:
    if not piece.calls:
        return {"content": piece.text}
    return {"content": piece.text or None, "tool_calls": piece.calls}


def oldest(pieces: Sequence[Piece]) -> int:
    """The oldest policy version of any token; -1 without a token."""
    versions = [piece.part.policy_versions for piece in pieces if len(piece.part.policy_versions)]
    return min((int(each.min()) for each in versions), default=-1)
