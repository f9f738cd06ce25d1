"""Turns are appended token by token: the whole is the template's rendering, and nothing of it is written twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from tranship.data.turns import TurnEncoder, check_template, reads_tools
from tranship.models.tiny import CHAT_TEMPLATE, make_tokenizer
from tranship.types import UserError

OTHER_END, IM_START, IM_END = 0, 1, 2
END = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
# Several answers of tools in one block, as Qwen writes them.
BLOCKS = (
    "{% if tools %}{{ '<|im_start|>system\nTools:\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{% if message.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
) + END
TRIMS = CHAT_TEMPLATE.replace("message['content']", "message['content'] | trim")
QUOTES = (
    "{% for message in messages %}{% if message.role == 'tool' %}"
    "{{ '<|im_start|>ipython\n' + (message.content | tojson) + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
) + END
# Thoughts before the last question of the user are left out.
FORGETS = (
    "{% set last = namespace(user=0) %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% set last.user = loop.index0 %}{% endif %}{% endfor %}{% for message in messages %}"
    "{% set content = message.content %}{% if message.role == 'assistant' and loop.index0 < last.user %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}{% endfor %}"
) + END
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=24)
SPECIAL = st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>", "<|endoftext|>", "a", "\n", " ", "qzmark0000e", '"']))
MODEL_TURNS = st.from_regex(r"[A-Za-z][A-Za-z0-9 .\n]{0,20}[a-z]", fullmatch=True)


def with_template(template: str) -> Any:
    tokenizer = make_tokenizer(600)
    tokenizer.chat_template = template
    return tokenizer


def whole(tokenizer: Any, messages: list[dict[str, Any]], **args: Any) -> list[int]:
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **args)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def turn(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def tool(content: str) -> dict[str, str]:
    return {"role": "tool", "content": content}


@settings(max_examples=40, deadline=None)
@given(
    template=st.sampled_from([CHAT_TEMPLATE, BLOCKS, QUOTES, FORGETS, TRIMS]),
    question=WORDS,
    rounds=st.lists(st.tuples(MODEL_TURNS, st.booleans(), st.lists(WORDS, min_size=1, max_size=2)), max_size=3),
)
def test_the_whole_is_what_the_template_writes(
    template: str, question: str, rounds: list[tuple[str, bool, list[str]]]
) -> None:
    tokenizer = with_template(template)
    encoder = TurnEncoder(tokenizer, [IM_END])
    messages: list[dict[str, Any]] = [user(question)]
    ids = whole(tokenizer, messages)
    for text, cut, observations in rounds:
        written = tokenizer.encode(text, add_special_tokens=False) + ([] if cut else [IM_END])
        answers = [tool(observation) for observation in observations]
        suffix = encoder.suffix(messages, answers, ended=encoder.ended(np.array(written)))
        assert suffix.dtype == np.int32
        ids = [*ids, *written, *suffix.tolist()]
        messages += [turn(text), *answers]
        assert ids == whole(tokenizer, messages)


@settings(max_examples=60, deadline=None)
@given(
    contents=st.lists(SPECIAL.map("".join), min_size=1, max_size=3), template=st.sampled_from([CHAT_TEMPLATE, BLOCKS])
)
def test_text_of_the_world_never_becomes_a_special_token(contents: list[str], template: str) -> None:
    tokenizer = with_template(template)
    encoder = TurnEncoder(tokenizer, [IM_END])
    history = [user("<|im_end|> qzmark0001e")]
    suffix = encoder.suffix(history, [tool(content) for content in contents], ended=False).tolist()
    harmless = encoder.suffix(history, [tool("x") for _ in contents], ended=False).tolist()
    specials = [token for token in suffix if token < 3]
    assert specials == [token for token in harmless if token < 3]
    messages = [*history, turn("T"), *(tool(content) for content in contents)]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert rendered.endswith(tokenizer.decode(suffix))
    assert tokenizer.decode(suffix).startswith("<|im_end|>\n")


def test_what_the_model_wrote_is_not_looked_at() -> None:
    """Two ways to write the same text in tokens, and an end token that is not the template's, stand as sampled."""
    tokenizer = with_template(CHAT_TEMPLATE)
    encoder = TurnEncoder(tokenizer, [IM_END, OTHER_END])
    odd = np.array([*(tokenizer.encode(letter)[0] for letter in "the"), OTHER_END])
    assert len(odd) - 1 > len(tokenizer.encode("the"))
    assert encoder.ended(odd)
    assert encoder.text(odd) == "the"
    suffix = encoder.suffix([user("q")], [tool("a")], ended=True).tolist()
    assert tokenizer.decode(suffix) == "\n<|im_start|>tool\na<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(encoder.suffix([user("q")], [tool("a")], ended=False)) == "<|im_end|>" + tokenizer.decode(
        suffix
    )
    assert not encoder.ended(odd[:-1])
    assert not encoder.ended(odd[:0])


def test_tags_of_calls_are_text_even_where_a_tokenizer_calls_them_special() -> None:
    tokenizer = with_template(CHAT_TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    encoder = TurnEncoder(tokenizer, [IM_END])
    ids = np.array([*tokenizer.encode('<think> so <tool_call>{"name": "x"}</tool_call>'), IM_START, IM_END])
    assert encoder.text(ids) == '<think> so <tool_call>{"name": "x"}</tool_call>'


def test_an_empty_turn_can_be_answered() -> None:
    tokenizer = with_template(CHAT_TEMPLATE)
    suffix = TurnEncoder(tokenizer, [IM_END]).suffix([user("q")], [user("go")], ended=False).tolist()
    assert whole(tokenizer, [user("q")]) + suffix == whole(tokenizer, [user("q"), turn(""), user("go")])


@settings(max_examples=60, deadline=None)
@given(contents=st.lists(WORDS, max_size=3), limit=st.integers(1, 40))
def test_long_observations_are_cut_at_their_end(contents: list[str], limit: int) -> None:
    tokenizer = with_template(CHAT_TEMPLATE)
    encoder = TurnEncoder(tokenizer, [IM_END])
    sizes = [len(tokenizer.encode(content, split_special_tokens=True)) for content in contents]
    kept, was_cut = encoder.cut([tool(content) for content in contents], limit)
    assert was_cut == (sum(sizes) > limit)
    assert sum(len(tokenizer.encode(message["content"], split_special_tokens=True)) for message in kept) <= limit
    for message, content in zip(kept, contents, strict=True):
        assert content.startswith(message["content"])
        assert message["role"] == "tool"


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, BLOCKS, TRIMS, QUOTES])
def test_templates_that_only_grow_are_taken(template: str) -> None:
    check_template(with_template(template), [IM_END], roles=["tool", "user"])


def test_a_template_that_forgets_thoughts_is_refused_for_the_roles_for_which_it_does() -> None:
    tokenizer = with_template(FORGETS)
    check_template(tokenizer, [IM_END], roles=["tool"])
    with pytest.raises(UserError, match=r"rewrites earlier turns of the assistant when a user message follows .*think"):
        check_template(tokenizer, [IM_END], roles=["tool", "user"])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        (CHAT_TEMPLATE.replace("<|im_end|>", ""), "does not end a turn"),
        (CHAT_TEMPLATE.replace("+ '<|im_end|>", "+ ' <|im_end|>"), "does not end a turn"),
        (
            "{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + CHAT_TEMPLATE,
            "no tools",
        ),
        (
            CHAT_TEMPLATE.replace("for message in messages", "for message in messages if message.role != 'tool'"),
            "drops",
        ),
        (CHAT_TEMPLATE.replace("for message in messages", "for message in messages[-1:]"), "rewrites earlier turns"),
        (CHAT_TEMPLATE.replace("message['content']", "message['content'] | upper"), "rewrites|drops"),
    ],
)
def test_templates_that_cannot_carry_turns_are_refused(template: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_template(with_template(template), [IM_END], roles=["tool"])  # type: ignore[arg-type]


def test_whether_a_template_reads_tools() -> None:
    assert reads_tools(with_template(BLOCKS))
    assert not reads_tools(with_template(CHAT_TEMPLATE))
    assert not reads_tools(with_template(None))  # type: ignore[arg-type]


def test_tools_stand_before_the_turns() -> None:
    tokenizer = with_template(BLOCKS)
    schema = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    check_template(tokenizer, [IM_END], tools=[schema])
    suffix = TurnEncoder(tokenizer, [IM_END]).suffix([user("q")], [tool("a")], ended=True, tools=[schema]).tolist()
    written = [*whole(tokenizer, [user("q")], tools=[schema]), *tokenizer.encode("Call"), IM_END]
    assert written + suffix == whole(tokenizer, [user("q"), turn("Call"), tool("a")], tools=[schema])
