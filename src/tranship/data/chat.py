"""Prompts to token ids: messages through the chat template, strings as they are.

Text of users never becomes a special token, whatever it looks like, and no message is lost in a template that does not
know its role. (Tokens that a tokenizer adds without marking them special, such as <think>, are text.)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import jinja2
import numpy as np

from tranship.data.special import SpecialTokens
from tranship.data.templates import check_template_args, check_written, variables
from tranship.types import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]

_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
# Kinds of conversations (roles, calls, tools) whose special tokens are remembered.
_MOST_SHAPES = 4096


class PromptEncoder:
    """Encodes prompts with one tokenizer, system prompt and set of template arguments.

    system_prompt: put before messages that have no system message of their own. template_args: further variables of
    the chat template. Raises UserError for arguments that the template does not read.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        system_prompt: str | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._system_prompt = system_prompt
        self._args = dict(template_args or {})
        self._special = SpecialTokens(tokenizer)
        self._special_ids = frozenset(self._special.of.values())
        self._expected: dict[str, list[int]] = {}
        if self._args and tokenizer.chat_template:
            check_template_args(self._template(_Rendering([], True)), self._args)

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of all special tokens."""
        return self._special_ids

    @property
    def reads_clock(self) -> bool:
        """Whether the template writes the date into prompts, so that their tokens differ from day to day."""
        if not self._tokenizer.chat_template or "date_string" in self._args:
            return False
        return "strftime_now" in (variables(self._template(_Rendering([], True))) or ())

    def encode(
        self, prompt: str | Sequence[Message], tools: Sequence[Message] = (), generation_prompt: bool = True
    ) -> np.ndarray:
        """The prompt's token ids, int32 [P].

        Messages go through the chat template, with the generation prompt (what opens the assistant's turn) at the
        end unless told otherwise. tools: JSON schemas for the template. A string is encoded as plain text, with what
        the tokenizer puts before any text (a start token), and without the chat template. Raises UserError where
        there is no template, or it does not take these messages, or it would leave one of them out.
        """
        if isinstance(prompt, str):
            if tools:
                raise UserError("the prompt is a plain string, which cannot have tools: give prompts as messages")
            return np.array(self._encode_string(prompt), np.int32)
        if not self._tokenizer.chat_template:
            raise UserError(
                "the prompt is a list of messages, but the tokenizer has no chat template: use an instruct model, add "
                "a chat_template.jinja to its folder, or give prompts as plain strings"
            )
        render = _Rendering(list(tools), generation_prompt)
        return np.array(self._encode_messages(self.conversation(prompt), render), np.int32)

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of `text` as it is: no special token in it, none before or after it."""
        return self._special.plain(text)

    def conversation(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages that the template gets: data.system_prompt first where there is no system message."""
        own = [dict(message) for message in messages]
        if self._system_prompt is not None and not any(message["role"] == "system" for message in own):
            return [{"role": "system", "content": self._system_prompt}, *own]
        return own

    def has_special_text(self, text: str) -> bool:
        """Whether `text` holds the text of a special token."""
        return self._special.pattern.search(text) is not None

    def _encode_string(self, text: str) -> list[int]:
        if self._system_prompt is not None or self._args:
            raise UserError(
                "the prompt is a plain string, which data.system_prompt and data.template_args cannot change: give "
                "prompts as messages, or leave these settings out"
            )
        ids = self._tokenizer.encode(text, add_special_tokens=True, split_special_tokens=True)
        return cast(list[int], ids)

    def _encode_messages(self, messages: list[dict[str, Any]], render: _Rendering) -> list[int]:
        contents = [_content(message) for message in messages]
        self._check_fields(messages, render)
        if any(self._special.pattern.search(content) for content in contents):
            ids = self._encode_apart(messages, contents, render)
        else:
            ids = self._ids(messages, render)
        if self._special_sequence(ids) != self._expected_sequence(messages, contents, render):
            raise UserError(
                "the prompt's text would become special tokens of the model: remove text such as "
                f"{sorted(self._special.of)[:3]} from it"
            )
        return ids

    def _check_fields(self, messages: list[dict[str, Any]], render: _Rendering) -> None:
        """Refuse tools and fields of messages that the template ignores or that hold special text."""
        fields = [{key: value for key, value in message.items() if key != "content"} for message in messages]
        check_written(self._template(render), fields, render.tools)
        for text in _strings([fields, render.tools]):
            if found := self._special.pattern.search(text):
                raise UserError(
                    f"only the content of a message can hold {found[0]!r}, a special token of the model, as text: take "
                    "it out of tools, tool calls, thoughts and names"
                )

    def _encode_apart(self, messages: list[dict[str, Any]], contents: list[str], render: _Rendering) -> list[int]:
        """Ids of messages whose content holds the text of special tokens, encoded as the plain text that it is.

        Special tokens are recognised in the template's own parts alone; the text between two of them, from template
        and content together, is encoded at once, so nothing else differs from the usual way. That is verified on a
        twin of the messages in which the special text is replaced.
        """
        twins = [self._special.pattern.sub(lambda match: "x" * len(match[0]), content) for content in contents]
        if self._special.ids(self._parts(messages, twins, render)) != self._ids(
            _with_contents(messages, twins), render
        ):
            raise UserError(
                "the prompt holds text of special tokens, and this tokenizer cannot encode it as plain text: remove "
                f"text such as {sorted(self._special.of)[:3]} from it"
            )
        return self._special.ids(self._parts(messages, contents, render))

    def _parts(self, messages: list[dict[str, Any]], contents: list[str], render: _Rendering) -> list[tuple[str, bool]]:
        """The rendered prompt cut into template (True) and content (False), by rendering marks in place of contents."""
        marks = _marks(contents, self._render(messages, render))
        frame = self._render(_with_contents(messages, marks), render)
        rendered = self._render(_with_contents(messages, contents), render)
        parts: list[tuple[str, bool]] = []
        written = 0
        for mark, content in zip(marks, contents, strict=True):
            if mark == content:
                continue
            if frame.count(mark) != 1:
                raise UserError("the prompt holds text of special tokens, and the chat template moves or drops it")
            before, _, frame = frame.partition(mark)
            rest = rendered[written + len(before) :]
            form = next((form for form in _forms(content) if rest.startswith(form)), None)
            if form is None:
                break
            parts += [(before, True), (form, False)]
            written += len(before) + len(form)
        parts.append((frame, True))
        if "".join(part for part, _ in parts) != rendered:
            raise UserError("the prompt holds text of special tokens, and the chat template rewrites it")
        return parts

    def _expected_sequence(self, messages: list[dict[str, Any]], contents: list[str], render: _Rendering) -> list[int]:
        """The special tokens that the template writes for messages like these, with harmless contents.

        Raises UserError where a message's content does not come out of the template at all.
        """
        marks = _marks(contents, "")
        harmless = _with_contents(messages, marks)
        key = json.dumps([harmless, render.tools, render.generation_prompt], sort_keys=True, default=str)
        if key not in self._expected:
            rendered = self._render(harmless, render)
            for message, mark in zip(messages, marks, strict=True):
                if mark.strip() and mark not in rendered:
                    raise UserError(
                        f"the chat template leaves the content of the {message['role']} message out: use roles that "
                        "it knows"
                    )
            if len(self._expected) >= _MOST_SHAPES:
                self._expected.clear()
            self._expected[key] = self._special_sequence(self._ids(harmless, render))
        return self._expected[key]

    def _special_sequence(self, ids: list[int]) -> list[int]:
        return [token for token in ids if token in self._special_ids]

    def _template(self, render: _Rendering) -> str:
        # A tokenizer may have one template for conversations with tools, and one for those without.
        return self._tokenizer.get_chat_template(tools=cast(Any, render.tools or None))

    def _ids(self, messages: list[dict[str, Any]], render: _Rendering) -> list[int]:
        return cast(list[int], self._apply(messages, render, tokenize=True))

    def _render(self, messages: list[dict[str, Any]], render: _Rendering) -> str:
        return cast(str, self._apply(messages, render, tokenize=False))

    def _apply(self, messages: list[dict[str, Any]], render: _Rendering, tokenize: bool) -> Any:
        try:
            return self._tokenizer.apply_chat_template(
                messages,
                tools=cast(Any, render.tools or None),
                tokenize=tokenize,
                add_generation_prompt=render.generation_prompt,
                return_dict=False,
                **self._args,
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
            roles = [message["role"] for message in messages]
            raise UserError(f"the chat template does not take messages of roles {roles}: {error}") from error


@dataclass(frozen=True)
class _Rendering:
    """What the template is given besides messages."""

    tools: list[Message]
    generation_prompt: bool


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    system_prompt: str | None = None,
    template_args: Mapping[str, Any] | None = None,
) -> np.ndarray:
    """Token ids int32 [P] of one list of messages; `PromptEncoder` does the same for many."""
    return PromptEncoder(tokenizer, system_prompt, template_args).encode(messages)


def _content(message: Message) -> str:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise UserError(f"a message's role is {role!r}: use a word such as system, user or assistant")
    if not isinstance(content, str):
        raise UserError(f"the content of a {role} message is {type(content).__name__}: give a string")
    return content


def _with_contents(messages: list[dict[str, Any]], contents: Sequence[str]) -> list[dict[str, Any]]:
    return [{**message, "content": content} for message, content in zip(messages, contents, strict=True)]


def _marks(contents: Sequence[str], text: str) -> list[str]:
    """A word that does not occur in `text` for each content; one that is empty stays so (templates ask for that)."""
    stem = "qzmark"
    while stem in text:
        stem += "z"
    return [f"{stem}{index:04d}e" if content.strip() else content for index, content in enumerate(contents)]


def _forms(content: str) -> tuple[str, ...]:
    """What templates make of a content, in the order in which it is tried: itself, a JSON string, stripped."""
    return content, json.dumps(content, ensure_ascii=False)[1:-1], content.strip()


def _strings(value: Any) -> Iterator[str]:
    """All text inside a JSON value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield str(key)
            yield from _strings(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _strings(entry)
