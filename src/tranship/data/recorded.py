"""Recorded responses to token ids and masks: what the assistant wrote is learned, and nothing else.

Conversations are rendered turn by turn, and each rendering must begin with the one before, token by token: what is
learned is then what the model would see and write. A template that rewrites earlier turns is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tranship.data.chat import Message, PromptEncoder
from tranship.types import Recorded, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHOWN = 24


def encode_recorded(
    encoder: PromptEncoder,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Sequence[Message],
    response: str | Sequence[Message],
    tools: Sequence[Message] = (),
    prompt_ids: Sequence[int] | np.ndarray | None = None,
) -> Recorded:
    """The response that follows `prompt`, with the token that ends the assistant's last turn.

    prompt_ids: `encoder.encode(prompt, tools)`, where the caller has it already.

    Messages: each turn of the assistant is learned from behind the generation prompt up to its end-of-turn token
    (the last special token that the template writes behind it); the messages of others between two turns, and what
    opens a turn, are not. Text: all of it and the tokenizer's end-of-text token are learned; it is encoded together
    with the prompt where the prompt's tokens stay the same, and by itself otherwise.

    Raises UserError where the last message is not the assistant's, where the template ends a turn with no special
    token, or where a longer conversation does not begin with the tokens of a shorter one.
    """
    before = np.asarray(encoder.encode(prompt, tools) if prompt_ids is None else prompt_ids).tolist()
    if isinstance(response, str):
        assert isinstance(prompt, str), "text follows text"
        return _plain(encoder, tokenizer, prompt, response, before)
    assert not isinstance(prompt, str), "messages follow messages"
    return _turns(encoder, tokenizer, prompt, response, tools, before)


def _plain(
    encoder: PromptEncoder, tokenizer: PreTrainedTokenizerBase, prompt: str, response: str, before: list[int]
) -> Recorded:
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise UserError("the response is plain text, and the tokenizer has no end-of-text token to close it with")
    whole = encoder.encode(prompt + response).tolist()
    ids = whole[len(before) :] if whole[: len(before)] == before else encoder.encode_plain(response)
    if _decode(tokenizer, before + ids) != _decode(tokenizer, whole):
        raise UserError(
            "prompt and completion do not join: the tokenizer adds or removes text between them; give them as messages"
        )
    return Recorded(np.array([*ids, end], np.int32), np.ones(len(ids) + 1, bool))


def _turns(
    encoder: PromptEncoder,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[Message],
    response: Sequence[Message],
    tools: Sequence[Message],
    prompt_ids: list[int],
) -> Recorded:
    if response[-1]["role"] != "assistant":
        raise UserError(
            f"the conversation ends with a {response[-1]['role']} message: a recorded response ends with the assistant"
        )
    messages = [*prompt, *response]
    ids = prompt_ids
    mask: list[bool] = []
    for place in range(len(prompt), len(messages)):
        if messages[place]["role"] != "assistant":
            continue
        before = ids if place == len(prompt) else encoder.encode(messages[:place], tools).tolist()
        _check_growth(tokenizer, ids, before, place)
        after = encoder.encode(messages[: place + 1], tools, generation_prompt=False).tolist()
        _check_growth(tokenizer, before, after, place + 1)
        end = _end_of_turn(encoder, tokenizer, after, len(before))
        mask += [False] * (len(before) - len(ids)) + [True] * (end - len(before))
        ids = after[:end]
    return Recorded(np.array(ids[len(prompt_ids) :], np.int32), np.array(mask, bool))


def _end_of_turn(encoder: PromptEncoder, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], start: int) -> int:
    """Where the turn that begins at `start` ends: behind its last special token, which only white space may follow."""
    end = next((place + 1 for place in reversed(range(start, len(ids))) if ids[place] in encoder.special_ids), start)
    if end == start or _decode(tokenizer, ids[end:]).strip():
        raise UserError(
            "the chat template ends the assistant's turn with no special token, so the model could not learn to stop: "
            f"it ends in {_decode(tokenizer, ids[-_SHOWN:])!r}; use another template"
        )
    return end


def _check_growth(tokenizer: PreTrainedTokenizerBase, shorter: list[int], longer: list[int], count: int) -> None:
    """Raise UserError unless `longer`, the tokens of `count` messages, begins with `shorter`."""
    if longer[: len(shorter)] == shorter:
        return
    same = next((i for i, (a, b) in enumerate(zip(shorter, longer, strict=False)) if a != b), len(longer))
    was, now = (_decode(tokenizer, ids[same : same + _SHOWN]) for ids in (shorter, longer))
    raise UserError(
        f"the chat template is not append-only: with {count} messages, token {same} on reads {now!r}, and with fewer "
        f"it read {was!r}; use a template that keeps earlier turns as they are, or conversations of one turn"
    )


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    text = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str), text
    return text
