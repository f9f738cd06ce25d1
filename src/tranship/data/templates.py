"""What a chat template reads: so that nothing that it is given is ignored in silence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.meta

from tranship.types import UserError

# What the template is given anyway, or what would change the encoding's form.
_RESERVED_ARGS = {"messages", "conversation", "tools", "add_generation_prompt", "tokenize", "chat_template"}
_RESERVED_ARGS |= {"continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"}
_RESERVED_ARGS |= {"return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens"}
# Fields in which data sets keep what an assistant thought; the library gives templates each under all these names.
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")


@lru_cache(maxsize=16)
def variables(template: str) -> frozenset[str] | None:
    """The variables that a template reads; None where only the library's own parser knows its tags."""
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        return frozenset(jinja2.meta.find_undeclared_variables(environment.parse(template)))
    except jinja2.TemplateSyntaxError:
        return None


def check_template_args(template: str, args: Mapping[str, Any]) -> None:
    """Raise UserError for arguments that the template does not read, or that are not the user's to give."""
    if clash := sorted(set(args) & _RESERVED_ARGS):
        raise UserError(f"data.template_args: {clash[0]!r} is set by tranship itself: leave it out")
    known = variables(template)
    if known is not None and (unknown := sorted(set(args) - known)):
        readable = ", ".join(sorted(known - _RESERVED_ARGS)) or "nothing else"
        raise UserError(f"data.template_args: the chat template does not read {unknown[0]!r}; it reads: {readable}")


def check_written(template: str, fields: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> None:
    """Raise UserError where a template would leave out tools, calls of tools or thoughts.

    fields: of each message, without its content.
    """
    known = variables(template)
    if tools and known is not None and "tools" not in known:
        raise UserError("there are tools, but the chat template does not read them: use a model that knows tools")
    if any("tool_calls" in field for field in fields) and "tool_calls" not in template:
        raise UserError("a message has tool_calls, which the chat template does not write: use a model with tools")
    thoughts = next((key for key in _THOUGHTS if any(key in field for field in fields)), None)
    if thoughts and not any(key in template for key in _THOUGHTS):
        raise UserError(f"a message has {thoughts}, which the chat template does not write: use another model")
