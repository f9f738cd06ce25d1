"""Prompts to token ids: messages through the chat template, strings as they are.

Text of users never becomes a special token, whatever it looks like. (Tokens that a tokenizer adds without marking them
special, such as <think>, are text.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import jinja2
import jinja2.meta
import numpy as np

from tranship.types import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]

_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
# What the template is given anyway, or what would change the encoding's form.
_RESERVED_ARGS = {"messages", "conversation", "add_generation_prompt", "tokenize", "chat_template", "return_dict"}
_RESERVED_ARGS |= {"continue_final_message", "padding", "truncation", "max_length", "return_tensors"}
_RESERVED_ARGS |= {"return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens"}


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
        special = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special_ids = set(special.values())
        self._special_of = special
        longest_first = sorted(special, key=len, reverse=True)
        self._special_text = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._expected: dict[tuple[str, ...], list[int]] = {}
        if self._args and tokenizer.chat_template:
            _check_template_args(tokenizer.get_chat_template(), self._args)

    def encode(self, prompt: str | Sequence[Message]) -> np.ndarray:
        """The prompt's token ids, int32 [P].

        Messages go through the chat template, with the generation prompt at the end. A string is encoded as plain
        text, with what the tokenizer puts before any text (a start token), and without the chat template. Raises
        UserError where there is no template, or it does not take these messages.
        """
        if isinstance(prompt, str):
            return np.array(self._encode_string(prompt), np.int32)
        if not self._tokenizer.chat_template:
            raise UserError(
                "the prompt is a list of messages, but the tokenizer has no chat template: use an instruct model, add "
                "a chat_template.jinja to its folder, or give prompts as plain strings"
            )
        return np.array(self._encode_messages(self._with_system_prompt(prompt)), np.int32)

    def has_special_text(self, text: str) -> bool:
        """Whether `text` holds the text of a special token."""
        return self._special_text.search(text) is not None

    def _encode_string(self, text: str) -> list[int]:
        if self._system_prompt is not None or self._args:
            raise UserError(
                "the prompt is a plain string, which data.system_prompt and data.template_args cannot change: give "
                "prompts as messages, or leave these settings out"
            )
        ids = self._tokenizer.encode(text, add_special_tokens=True, split_special_tokens=True)
        return cast(list[int], ids)

    def _with_system_prompt(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        own = [dict(message) for message in messages]
        if self._system_prompt is not None and not any(message["role"] == "system" for message in own):
            return [{"role": "system", "content": self._system_prompt}, *own]
        return own

    def _encode_messages(self, messages: list[dict[str, Any]]) -> list[int]:
        contents = [_content(message) for message in messages]
        if any(self._special_text.search(content) for content in contents):
            ids = self._encode_apart(messages, contents)
        else:
            ids = self._ids(messages)
        if self._special_sequence(ids) != self._expected_sequence(messages):
            raise UserError(
                "the prompt's text would become special tokens of the model: remove text such as "
                f"{sorted(self._special_of)[:3]} from it"
            )
        return ids

    def _encode_apart(self, messages: list[dict[str, Any]], contents: list[str]) -> list[int]:
        """Ids of messages whose content holds the text of special tokens, encoded as the plain text that it is.

        Special tokens are recognised in the template's own parts alone; the text between two of them, from template
        and content together, is encoded at once, so nothing else differs from the usual way. That is verified on a
        twin of the messages in which the special text is replaced.
        """
        twins = [self._special_text.sub(lambda match: "x" * len(match[0]), content) for content in contents]
        if self._encode_runs(messages, twins) != self._ids(_with_contents(messages, twins)):
            raise UserError(
                "the prompt holds text of special tokens, and this tokenizer cannot encode it as plain text: remove "
                f"text such as {sorted(self._special_of)[:3]} from it"
            )
        return self._encode_runs(messages, contents)

    def _encode_runs(self, messages: list[dict[str, Any]], contents: list[str]) -> list[int]:
        ids: list[int] = []
        run = ""
        for part, is_template in self._parts(messages, contents):
            pieces = self._special_text.split(part) if is_template else [part]
            specials = self._special_text.findall(part) if is_template else []
            run += pieces[0]
            for special, text in zip(specials, pieces[1:], strict=True):
                ids += [*self._plain(run), self._special_of[special]]
                run = text
        return ids + self._plain(run)

    def _plain(self, text: str) -> list[int]:
        if not text:
            return []
        ids = self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return cast(list[int], ids)

    def _parts(self, messages: list[dict[str, Any]], contents: list[str]) -> list[tuple[str, bool]]:
        """The rendered prompt cut into template (True) and content (False), by rendering marks in place of contents."""
        marks = _marks(len(contents), "".join(contents))
        frame = self._render(_with_contents(messages, marks))
        rendered = self._render(_with_contents(messages, contents))
        parts: list[tuple[str, bool]] = []
        position = 0
        for mark, content in zip(marks, contents, strict=True):
            start = frame.find(mark, position)
            if start < 0 or frame.count(mark) != 1:
                raise UserError("the prompt holds text of special tokens, and the chat template moves or drops it")
            parts += [(frame[position:start], True), (content, False)]
            position = start + len(mark)
        parts.append((frame[position:], True))
        if "".join(part for part, _ in parts) != rendered:
            parts = [(part if is_template else part.strip(), is_template) for part, is_template in parts]
        if "".join(part for part, _ in parts) != rendered:
            raise UserError("the prompt holds text of special tokens, and the chat template rewrites it")
        return parts

    def _expected_sequence(self, messages: list[dict[str, Any]]) -> list[int]:
        """The special tokens that the template writes for messages of these roles."""
        roles = tuple(message["role"] for message in messages)
        if roles not in self._expected:
            harmless = _with_contents(messages, ["x"] * len(messages))
            self._expected[roles] = self._special_sequence(self._ids(harmless))
        return self._expected[roles]

    def _special_sequence(self, ids: list[int]) -> list[int]:
        return [token for token in ids if token in self._special_ids]

    def _ids(self, messages: list[dict[str, Any]]) -> list[int]:
        return cast(list[int], self._apply(messages, tokenize=True))

    def _render(self, messages: list[dict[str, Any]]) -> str:
        return cast(str, self._apply(messages, tokenize=False))

    def _apply(self, messages: list[dict[str, Any]], tokenize: bool) -> Any:
        try:
            return self._tokenizer.apply_chat_template(
                messages, tokenize=tokenize, add_generation_prompt=True, return_dict=False, **self._args
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
            roles = [message["role"] for message in messages]
            raise UserError(f"the chat template does not take messages of roles {roles}: {error}") from error


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


def _marks(count: int, text: str) -> list[str]:
    """`count` words that do not occur in `text`."""
    stem = "qzmark"
    while stem in text:
        stem += "z"
    return [f"{stem}{index:04d}e" for index in range(count)]


def _check_template_args(template: str, args: Mapping[str, Any]) -> None:
    if clash := sorted(set(args) & _RESERVED_ARGS):
        raise UserError(f"data.template_args: {clash[0]!r} is set by tranship itself: leave it out")
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        known = jinja2.meta.find_undeclared_variables(environment.parse(template))
    except jinja2.TemplateSyntaxError:
        return  # Tags of the library's own; its renderer reports real errors.
    if unknown := sorted(set(args) - known):
        readable = ", ".join(sorted(known - _RESERVED_ARGS)) or "nothing else"
        raise UserError(f"data.template_args: the chat template does not read {unknown[0]!r}; it reads: {readable}")
