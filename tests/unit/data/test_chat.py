"""Encoding prompts: the template's special tokens, and nobody else's."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from tranship.data.chat import PromptEncoder, encode_chat
from tranship.models.tiny import make_tokenizer
from tranship.models.tokenizer import template_system_prompt
from tranship.types import UserError

TOKENIZER = make_tokenizer(600)
IM_START, IM_END = 1, 2
SYSTEM_TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if thinking is defined and not thinking %}{{ 'No.' }}{% endif %}{% endif %}"
)
TEXTS = st.lists(
    st.one_of(st.text(max_size=8), st.sampled_from(["<|im_end|>", "<|im_start|>", "<|im_", "end|>", "\n", " "])),
    max_size=6,
).map("".join)


def plain_ids(messages: list[dict[str, str]], tokenizer=TOKENIZER) -> list[int]:
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


TOOL_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}{{ '<call>' + call['function'] | tojson + '</call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}


def call(**arguments: str) -> dict:
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": arguments}}]}


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def with_template(template: str):
    tokenizer = make_tokenizer(600)
    tokenizer.chat_template = template
    return tokenizer


@settings(deadline=None, max_examples=60)
@given(content=st.text(max_size=40).filter(lambda text: "<|" not in text))
def test_harmless_text_is_encoded_as_the_template_does(content: str):
    ids = encode_chat(TOKENIZER, user(content))
    assert ids.dtype == np.int32
    assert ids.tolist() == plain_ids(user(content))


@settings(deadline=None)
@given(contents=st.lists(TEXTS, min_size=1, max_size=3))
def test_text_of_users_never_becomes_a_special_token(contents: list[str]):
    roles = ["system", "user", "assistant"]
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    ids = encode_chat(TOKENIZER, messages).tolist()
    expected_specials = [IM_START, IM_END] * len(messages) + [IM_START]
    assert [token for token in ids if token in (0, 1, 2)] == expected_specials
    rendered = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert TOKENIZER.decode(ids) == rendered


def test_special_looking_text_is_read_as_text():
    ids = encode_chat(TOKENIZER, user("a<|im_end|>b")).tolist()
    assert ids.count(IM_END) == 1
    assert len(ids) > len(plain_ids(user("a<|im_end|>b")))


def test_a_template_that_trims_is_followed():
    tokenizer = with_template(SYSTEM_TEMPLATE)
    ids = encode_chat(tokenizer, user("  x<|im_end|> ")).tolist()
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(
        user("  x<|im_end|> "), add_generation_prompt=True, tokenize=False
    )
    assert ids.count(IM_END) == 2


@settings(deadline=None, max_examples=60)
@given(contents=st.lists(TEXTS, min_size=3, max_size=3))
def test_each_content_may_be_written_in_a_form_of_its_own(contents: list[str]):
    body = "{{ content | trim if loop.index0 == 0 else {'output': content} | tojson if loop.index0 == 1 else content }}"
    tokenizer = with_template(
        "{% for message in messages %}{% set content = message['content'] %}{{ '<|im_start|>' }}"
        + body
        + "{{ '<|im_end|>' }}{% endfor %}"
    )
    messages = [
        {"role": role, "content": text} for role, text in zip(["user", "tool", "system"], contents, strict=True)
    ]
    ids = encode_chat(tokenizer, messages).tolist()
    assert [token for token in ids if token in (0, 1, 2)] == [IM_START, IM_END] * 3
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(messages, tokenize=False)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("{{ message['content'] | upper }}", "moves or drops"),
        ("{{ message['content'] + message['content'] }}", "moves or drops"),
        ("{{ message['content'] | replace('<', '[') }}", "rewrites"),
    ],
)
def test_a_template_that_changes_special_text_is_refused(body: str, message: str):
    tokenizer = with_template("{% for message in messages %}" + body + "{% endfor %}")
    with pytest.raises(UserError, match=message):
        encode_chat(tokenizer, user("x<|im_end|>"))


def test_special_tokens_that_eat_spaces_are_refused_rather_than_wrong():
    tokenizer = make_tokenizer(600)
    tokenizer.add_tokens([AddedToken("<|go|>", special=True, rstrip=True, normalized=False)], special_tokens=True)
    tokenizer.chat_template = "{% for message in messages %}{{ '<|go|>' + message['content'] }}{% endfor %}"
    assert encode_chat(tokenizer, user("  x")).tolist() == plain_ids(user("  x"), tokenizer)
    with pytest.raises(UserError, match="cannot encode it as plain text"):
        encode_chat(tokenizer, user("  x<|go|>"))


def test_text_that_joins_the_template_to_a_special_token_is_refused():
    tokenizer = with_template("{% for message in messages %}{{ '<|im_' + message['content'] }}{% endfor %}")
    with pytest.raises(UserError, match="would become special tokens"):
        encode_chat(tokenizer, user("end|>"))


def test_the_system_prompt_is_put_where_there_is_none():
    own = [{"role": "system", "content": "mine"}, *user("hi")]
    encoder = PromptEncoder(TOKENIZER, system_prompt="Be brief.")
    assert encoder.encode(user("hi")).tolist() == plain_ids([{"role": "system", "content": "Be brief."}, *user("hi")])
    assert encoder.encode(own).tolist() == plain_ids(own)


def test_the_template_own_system_prompt_is_reported():
    assert template_system_prompt(with_template(SYSTEM_TEMPLATE)) == "Be kind."
    assert template_system_prompt(TOKENIZER) is None
    refusing = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}{{ messages[0]['content'] }}"
    )
    assert template_system_prompt(with_template(refusing)) is None
    bare = make_tokenizer(600)
    bare.chat_template = None
    assert template_system_prompt(bare) is None


def test_template_arguments_reach_the_template_or_are_refused():
    tokenizer = with_template(SYSTEM_TEMPLATE)
    with_no = encode_chat(tokenizer, user("hi"), template_args={"thinking": False})
    assert tokenizer.decode(with_no).endswith("assistant\nNo.")
    with pytest.raises(UserError, match=r"does not read 'thinkin'; it reads: thinking"):
        encode_chat(tokenizer, user("hi"), template_args={"thinkin": False})
    with pytest.raises(UserError, match="'tokenize' is set by tranship"):
        encode_chat(tokenizer, user("hi"), template_args={"tokenize": False})


def test_tools_and_calls_reach_the_template():
    tokenizer = with_template(TOOL_TEMPLATE)
    messages = [*user("1 + 2?"), call(a="1", b="2"), {"role": "tool", "content": "3"}]
    ids = PromptEncoder(tokenizer).encode(messages, [TOOL]).tolist()
    assert ids == tokenizer.apply_chat_template(messages, [TOOL], add_generation_prompt=True, return_dict=False)
    assert '"description": "Adds."' in tokenizer.decode(ids)
    assert '<call>{"name": "add", "arguments": {"a": "1", "b": "2"}}</call>' in tokenizer.decode(ids)


@settings(deadline=None, max_examples=60)
@given(content=TEXTS, role=st.sampled_from(["tool", "system", "user", "assistant"]))
def test_text_of_any_role_is_text_beside_tools(content: str, role: str):
    tokenizer = with_template(TOOL_TEMPLATE)
    messages = [*user("x"), call(a="1"), {"role": role, "content": content}, *user("y")]
    ids = PromptEncoder(tokenizer).encode(messages, [TOOL]).tolist()
    assert [token for token in ids if token in (0, 1, 2)] == [IM_START, IM_END] * 5 + [IM_START]
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(
        messages, [TOOL], add_generation_prompt=True, tokenize=False
    )


@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        ([*user("x"), call(a="<|im_end|>")], []),
        ([*user("x"), call(**{"<|im_end|>": "a"})], []),
        (user("x"), [{**TOOL, "function": {"name": "add", "description": "<|im_end|>"}}]),
        ([{"role": "user", "content": "x", "name": "<|im_end|>"}], []),
    ],
)
def test_special_text_outside_contents_is_refused(messages: list, tools: list):
    with pytest.raises(UserError, match=r"only the content of a message can hold '<\|im_end\|>'"):
        PromptEncoder(with_template(TOOL_TEMPLATE)).encode(messages, tools)


def test_what_a_template_would_leave_out_is_refused():
    with pytest.raises(UserError, match="there are tools, but the chat template does not read them"):
        PromptEncoder(TOKENIZER).encode(user("x"), [TOOL])
    with pytest.raises(UserError, match="tool_calls, which the chat template does not write"):
        PromptEncoder(TOKENIZER).encode([*user("x"), call(a="1")])
    thought = {"role": "assistant", "content": "4", "reasoning_content": "2 + 2"}
    with pytest.raises(UserError, match="a message has reasoning_content, which the chat template does not write"):
        PromptEncoder(TOKENIZER).encode([*user("x"), thought, *user("y")])
    thinking = with_template("{% for m in messages %}{{ (m['thinking'] or '') + m['content'] }}{% endfor %}")
    assert TOKENIZER.decode(PromptEncoder(thinking).encode([*user("x"), thought])) == "x2 + 24"
    with pytest.raises(UserError, match="plain string, which cannot have tools"):
        PromptEncoder(TOKENIZER).encode("x", [TOOL])
    only_users = "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"
    encoder = PromptEncoder(with_template(only_users))
    assert encoder.encode(user("x")).tolist() == TOKENIZER.encode("x")
    with pytest.raises(UserError, match="leaves the content of the tool message out"):
        encoder.encode([*user("x"), {"role": "tool", "content": "y"}])


def test_empty_contents_stay_empty():
    no_content = "{% for m in messages %}{{ m['content'] or '<|endoftext|>' }}{% endfor %}"
    assert encode_chat(with_template(no_content), [*user(""), *user("<|im_end|>")]).tolist().count(0) == 1


def test_strings_are_plain_text():
    encoder = PromptEncoder(TOKENIZER)
    assert encoder.encode("What is 2?").tolist() == TOKENIZER("What is 2?")["input_ids"]
    ids = encoder.encode("<|im_start|>user").tolist()
    assert not {IM_START, IM_END} & set(ids)
    assert TOKENIZER.decode(ids) == "<|im_start|>user"
    with pytest.raises(UserError, match="system_prompt"):
        PromptEncoder(TOKENIZER, system_prompt="x").encode("hi")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "user<|im_end|>", "content": "x"}], "role"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], "give a string"),
    ],
)
def test_bad_messages_are_refused(messages: list, message: str):
    with pytest.raises(UserError, match=message):
        encode_chat(TOKENIZER, messages)


def test_messages_without_a_template_and_templates_that_refuse():
    bare = make_tokenizer(600)
    bare.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        encode_chat(bare, user("x"))
    with pytest.raises(UserError, match="only users"):
        encode_chat(with_template("{{ raise_exception('only users') }}"), user("x"))


def test_data_imports_without_torch():
    code = "import sys, tranship.data.prompts, tranship.data.stream; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
