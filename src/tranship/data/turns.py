"""Conversations of several turns, token by token: what the model wrote stays as it is, and what the world answers is
appended as the chat template would write it. Nothing is decoded and encoded again.

Text of the world never becomes a special token, whatever it looks like.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np

from tranship.data.special import SpecialTokens
from tranship.types import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]

# Turns as models write them; a template that rewrites one of them, once another turn follows, is refused.
_PROBES = ("Some words.", "<think>\nSome thought.\n</think>\n\nSome words.", '<tool_call>\n{"name": "x"}\n</tool_call>')
_TOOL_TAGS = ("<tool_call>", "</tool_call>")
# What templates do to a content, in the order in which it is tried.
_FORMS: tuple[Callable[[str], str], ...] = (
    lambda text: text,
    str.strip,
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
)


class TurnEncoder:
    """Appends turns to token ids with one tokenizer. Picklable by parts: it holds the tokenizer and plain values.

    end_ids: the ids that end a turn of the model. template_args: further variables of the chat template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: Iterable[int],
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._args = dict(template_args or {})
        self._end_ids = frozenset(end_ids)
        self._special = SpecialTokens(tokenizer)
        self._hidden_ids = {i for text, i in self._special.of.items() if text not in _TOOL_TAGS}

    def ended(self, turn_ids: np.ndarray) -> bool:
        """Whether a turn of the model ends by itself (and was not cut)."""
        return len(turn_ids) > 0 and int(turn_ids[-1]) in self._end_ids

    def text(self, turn_ids: np.ndarray) -> str:
        """A turn of the model as the world sees it: without special tokens (tags of tool calls stay)."""
        ids = [int(token) for token in turn_ids if int(token) not in self._hidden_ids]
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str), text
        return text

    def suffix(
        self, history: Sequence[Message], new: Sequence[Message], *, ended: bool, tools: Sequence[Message] = ()
    ) -> np.ndarray:
        """The ids int32 [S] that follow a turn of the model: its end, if it was cut, the new messages, and the
        beginning of the next turn.

        history: all messages before that turn (contents of the assistant's do not matter). ended: the turn's last id
        ends it. The model's end token stands, even if it is another than the template's. Raises UserError where the
        template does not take these messages, or writes no end after a turn.
        """
        ids = self._suffix(history, new, tools)
        if not ids or ids[0] not in self._end_ids:
            raise UserError(
                "the chat template does not end a turn of the assistant with one of the model's end-of-text tokens "
                f"({sorted(self._end_ids)}), so that turns cannot be appended: use another model or template"
            )
        return np.array(ids[1:] if ended else ids, np.int32)

    def cut(self, messages: Sequence[Message], max_tokens: int) -> tuple[list[dict[str, Any]], bool]:
        """Messages whose contents have at most max_tokens tokens together, cut at the end; and whether any was cut."""
        kept, was_cut = [], False
        for message in messages:
            content = message["content"]
            count = len(self._special.plain(content))
            while count > max_tokens:
                was_cut = True
                content = content[: min(len(content) - 1, len(content) * max_tokens // count)]
                count = len(self._special.plain(content))
            max_tokens -= count
            kept.append({**message, "content": content})
        return kept, was_cut

    def _suffix(self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Message]) -> list[int]:
        contents = [str(message["content"]) for message in new]
        turn, *marks = _marks(1 + len(new), [*contents, *(str(message.get("content")) for message in history)])
        before = [*history, {"role": "assistant", "content": turn}]
        frame = _after(self.render([*before, *_with_contents(new, marks)], tools), turn)
        rendered = _after(self.render([*before, *new], tools), turn)
        parts = re.split("|".join(map(re.escape, marks)), frame) if marks else [frame]
        if len(parts) != len(new) + 1 or re.findall("|".join(marks) or r"(?!)", frame) != marks:
            raise UserError(f"the chat template moves or drops messages of roles {[m['role'] for m in new]}")
        return self._join(parts, self._written(parts, contents, rendered))

    def _written(self, parts: Sequence[str], contents: Sequence[str], rendered: str) -> list[str]:
        """The contents as the template writes them: as they are, stripped, or as JSON strings."""
        for form in _FORMS:
            written = [form(content) for content in contents]
            if "".join(a + b for a, b in zip(parts, [*written, ""], strict=True)) == rendered:
                return written
        raise UserError("the chat template rewrites the contents of messages, which cannot be encoded as plain text")

    def _join(self, parts: Sequence[str], contents: Sequence[str]) -> list[int]:
        """Ids of template parts and contents in turn."""
        pairs = zip(parts, [*contents, ""], strict=True)
        return self._special.ids(piece for part, content in pairs for piece in ((part, True), (content, False)))

    def render(self, messages: Sequence[Message], tools: Sequence[Message] = (), *, tokenize: bool = False) -> Any:
        """The conversation as the template writes it, with the beginning of a turn at its end: text, or token ids."""
        try:
            return self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                tokenize=tokenize,
                add_generation_prompt=True,
                return_dict=False,
                **self._args,
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
            roles = [message["role"] for message in messages]
            raise UserError(f"the chat template does not take messages of roles {roles}: {error}") from error


def check_template(
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Iterable[int],
    *,
    roles: Sequence[str] = ("tool",),
    tools: Sequence[Message] = (),
    template_args: Mapping[str, Any] | None = None,
) -> None:
    """Raise UserError unless the chat template can carry a conversation of several turns that only ever grows.

    roles: of the world's messages. Refused: no template; one that does not take these roles; one that rewrites an
    earlier turn when another follows (as some do with thoughts); one that ends a turn with no end-of-text token; and
    one whose text the tokenizer encodes in another way when it is encoded in parts.
    """
    if not tokenizer.chat_template:
        raise UserError("env: the tokenizer has no chat template, which turns need: use an instruct model, or add one")
    encoder = TurnEncoder(tokenizer, end_ids, template_args)
    user = {"role": "user", "content": "A question."}
    for role in roles:
        for probe in _PROBES:
            _check_growth(encoder, user, {"role": role, "content": "An observation."}, probe, tools)
        answers = [{"role": role, "content": f"Observation {number}."} for number in range(2)]
        suffix = encoder.suffix([user], answers, ended=False, tools=tools).tolist()
        whole = encoder.render([user, {"role": "assistant", "content": _PROBES[0]}, *answers], tools, tokenize=True)
        if whole[len(whole) - len(suffix) :] != suffix:
            raise UserError(
                "env: the tokenizer encodes the chat template's text in another way when it is encoded turn by turn: "
                "use another model or template"
            )


def reads_tools(tokenizer: PreTrainedTokenizerBase, template_args: Mapping[str, Any] | None = None) -> bool:
    """Whether the chat template says what tools there are; where it does not, the system prompt has to."""
    if not tokenizer.chat_template:
        return False
    user = [{"role": "user", "content": "A question."}]
    tool = {"name": "qzname", "description": "qzdescription", "parameters": {"type": "object", "properties": {}}}
    encoder = TurnEncoder(tokenizer, (), template_args)
    return "qzname" in encoder.render(user, [{"type": "function", "function": tool}])


def _check_growth(encoder: TurnEncoder, user: Message, answer: Message, turn: str, tools: Sequence[Message]) -> None:
    messages = [user]
    before = encoder.render(messages, tools)
    for _ in range(2):
        messages = [*messages, {"role": "assistant", "content": turn}, answer]
        after = encoder.render(messages, tools)
        if not after.startswith(before + turn):
            raise UserError(
                f"env: the chat template rewrites earlier turns of the assistant when a {answer['role']} message "
                f"follows (a turn such as {turn!r}), so what was sampled would not be what is trained: use an "
                "environment that answers with other roles, or another template"
            )
        before = after


def _with_contents(messages: Sequence[Message], contents: Sequence[str]) -> list[dict[str, Any]]:
    return [{**message, "content": content} for message, content in zip(messages, contents, strict=True)]


def _after(rendered: str, mark: str) -> str:
    _, found, after = rendered.rpartition(mark)
    if not found:
        raise UserError("the chat template drops turns of the assistant: use another model or template")
    return after


def _marks(count: int, texts: Sequence[str]) -> list[str]:
    """`count` words of one length that occur in none of the texts."""
    stem = "qzmark"
    while any(stem in text for text in texts):
        stem += "z"
    return [f"{stem}{index:04d}e" for index in range(count)]
