"""Recorded responses: only what the assistant wrote is learned, token by token as the template writes it."""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tranship.config.schema import DataConfig, DataSourceConfig
from tranship.data.chat import PromptEncoder
from tranship.data.prompts import PromptSet, load_prompts
from tranship.data.recorded import encode_recorded
from tranship.models.tiny import make_tokenizer
from tranship.types import Recorded, UserError

TOKENIZER = make_tokenizer(600)
IM_START, IM_END = 1, 2
# Contents of users and assistants, with text that looks like special tokens.
TEXT = st.lists(
    st.one_of(st.text(max_size=6), st.sampled_from(["<|im_end|>", "<|im_start|>assistant\n", "<|im_", "\n", " "])),
    max_size=4,
).map("".join)
FORGETFUL = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if loop.last or message['role'] != 'assistant' %}{{ message['content'] }}{% else %}"
    "{{ message['content'] | replace('Long ', '...') }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def with_template(template: str):
    tokenizer = make_tokenizer(600)
    tokenizer.chat_template = template
    return tokenizer


def record(prompt: Any, response: Any, tokenizer: Any = TOKENIZER, **more: Any) -> Recorded:
    return encode_recorded(PromptEncoder(tokenizer), tokenizer, prompt, response, **more)


def learned(recorded: Recorded) -> list[str]:
    """The text of each run of learned tokens."""
    runs = groupby(zip(recorded.token_ids.tolist(), recorded.mask.tolist(), strict=True), key=lambda pair: pair[1])
    return [TOKENIZER.decode([token for token, _ in run]) for is_learned, run in runs if is_learned]


@settings(deadline=None, max_examples=60)
@given(texts=st.lists(st.tuples(st.sampled_from(["user", "tool"]), TEXT, TEXT), min_size=1, max_size=3))
def test_exactly_the_assistants_words_are_learned(texts: list[tuple[str, str, str]]):
    messages = [m for role, asked, said in texts for m in (turn(role, asked), turn("assistant", said))]
    encoder = PromptEncoder(TOKENIZER)
    prompt = encoder.encode(messages[:1])
    recorded = encode_recorded(encoder, TOKENIZER, messages[:1], messages[1:])
    assert (recorded.token_ids.dtype, recorded.mask.dtype) == (np.int32, np.bool_)
    assert learned(recorded) == [said + "<|im_end|>" for _, _, said in texts]
    # No text of anybody ends a turn or opens one.
    assert recorded.token_ids[recorded.mask].tolist().count(IM_END) == len(texts)
    assert recorded.token_ids.tolist().count(IM_START) == 2 * (len(texts) - 1)
    # The whole is what the template makes of the conversation, up to the line feed behind the last end of turn.
    whole = encoder.encode(messages, generation_prompt=False)
    joined = np.concatenate([prompt, recorded.token_ids])
    assert joined.tolist() == whole[: len(joined)].tolist()
    assert TOKENIZER.decode(whole[len(joined) :].tolist()) == "\n"


def test_the_end_of_a_turn_is_learned_and_nothing_after_it():
    recorded = record([turn("user", "Hi")], [turn("assistant", "Yes")])
    assert recorded.token_ids[-1] == IM_END
    assert recorded.mask.all()
    assert recorded.token_ids.tolist().count(IM_END) == 1


def test_earlier_turns_of_the_assistant_in_a_prompt_are_not_learned():
    prompt = [turn("user", "a"), turn("assistant", "b"), turn("user", "c")]
    assert learned(record(prompt, [turn("assistant", "d")])) == ["d<|im_end|>"]


def test_plain_text_ends_with_the_end_of_text_token():
    recorded = record("2 + 2 =", " 4<|im_end|>")
    assert TOKENIZER.decode(recorded.token_ids.tolist()) == " 4<|im_end|><|im_end|>"
    assert recorded.token_ids.tolist().count(IM_END) == 1
    assert recorded.mask.all()
    # "t" + "e" would be one token: the prompt's tokens stay as they are, as they will be when it is sampled from.
    assert record("t", "e").token_ids.tolist() == [*TOKENIZER.encode("e"), IM_END]
    assert TOKENIZER.encode("te") != TOKENIZER.encode("t") + TOKENIZER.encode("e")
    bare = make_tokenizer(600)
    bare.eos_token = None
    with pytest.raises(UserError, match="no end-of-text token"):
        record("a", "b", bare)


def test_a_template_that_rewrites_earlier_turns_is_refused_with_the_difference():
    tokenizer = with_template(FORGETFUL)
    one = [turn("user", "Hi"), turn("assistant", "Long thought")]
    assert learned(record(one[:1], one[1:], tokenizer)) == ["Long thought<|im_end|>"]
    with pytest.raises(
        UserError, match=r"not append-only: with 3 messages, token \d+ on reads '\.\.\.tho.*'Long thought"
    ):
        record(one[:1], [one[1], turn("user", "More"), turn("assistant", "Ok")], tokenizer)


def test_a_template_that_does_not_end_turns_is_refused():
    tokenizer = with_template(
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + ':\n' + message['content'] + '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant:\n' }}{% endif %}"
    )
    with pytest.raises(UserError, match="ends the assistant's turn with no special token"):
        record([turn("user", "Hi")], [turn("assistant", "Yes")], tokenizer)


def test_a_conversation_that_another_ends_is_refused():
    with pytest.raises(UserError, match="ends with a user message"):
        record([turn("user", "Hi")], [turn("assistant", "Yes"), turn("user", "No")])


def load(tmp_path: Path, rows: list[dict[str, Any]], kind: Any, **settings: Any) -> PromptSet:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = DataSourceConfig(source=str(path))
    context = settings.pop("context_length", None)
    data = DataConfig(train=source, **settings)
    return load_prompts(source, TOKENIZER, data=data, recorded=kind, context_length=context)


DEMONSTRATIONS = [
    {"messages": [turn("user", "Hi"), turn("assistant", "Yes"), turn("user", "So?"), turn("assistant", "No")]},
    {"prompt": [turn("user", "Hi")], "completion": [turn("assistant", "Yes")]},
]


def test_demonstrations_of_both_forms(tmp_path: Path):
    both = load(tmp_path, DEMONSTRATIONS, "demonstration").prompts
    assert [learned(prompt.recorded[0]) for prompt in both] == [["Yes<|im_end|>", "No<|im_end|>"], ["Yes<|im_end|>"]]
    assert both[0].token_ids.tolist() == both[1].token_ids.tolist()
    assert both[0].messages == ({"role": "user", "content": "Hi"},)
    plain = load(tmp_path, [{"prompt": "1 + 1 =", "completion": " 2"}], "demonstration").prompts[0]
    assert learned(plain.recorded[0]) == [" 2<|im_end|>"]


def test_a_system_prompt_goes_before_recorded_conversations_too(tmp_path: Path):
    prompt = load(tmp_path, DEMONSTRATIONS, "demonstration", system_prompt="Be brief.").prompts[0]
    assert prompt.text.startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert learned(prompt.recorded[0]) == ["Yes<|im_end|>", "No<|im_end|>"]
    assert prompt.messages[0] == {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    "preference",
    [
        {"prompt": [turn("user", "Hi")], "chosen": [turn("assistant", "A")], "rejected": [turn("assistant", "B")]},
        {
            "chosen": [turn("user", "Hi"), turn("assistant", "A")],
            "rejected": [turn("user", "Hi"), turn("assistant", "B")],
        },
        {
            "prompt": [turn("user", "Hi")],
            "chosen": [turn("user", "Hi"), turn("assistant", "A")],
            "rejected": [turn("user", "Hi"), turn("assistant", "B")],
        },
    ],
)
def test_preferences_with_their_prompt_or_with_it_inside(tmp_path: Path, preference: dict[str, Any]):
    prompt = load(tmp_path, [preference], "preference").prompts[0]
    assert prompt.text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert [learned(recorded) for recorded in prompt.recorded] == [["A<|im_end|>"], ["B<|im_end|>"]]


def test_shared_turns_of_a_preference_are_its_prompt(tmp_path: Path):
    shared = [turn("user", "a"), turn("assistant", "b"), turn("user", "c")]
    row = {"chosen": [*shared, turn("assistant", "d")], "rejected": [*shared, turn("assistant", "e")]}
    prompt = load(tmp_path, [row], "preference").prompts[0]
    assert [message["content"] for message in prompt.messages] == ["a", "b", "c"]
    assert [learned(recorded) for recorded in prompt.recorded] == [["d<|im_end|>"], ["e<|im_end|>"]]


@pytest.mark.parametrize(
    ("row", "kind", "message"),
    [
        ({"prompt": "a"}, "demonstration", "0 recorded responses, not 1: give demonstrations as a column messages"),
        (
            {"prompt": "a", "completion": "b"},
            "preference",
            "1 recorded responses, not 2: give preferences as columns chosen",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "demonstration", "2 recorded responses, not 1"),
        ({"prompt": "a", "chosen": "b"}, "preference", "column 'rejected' is missing"),
        ({"chosen": "b", "rejected": "c"}, "preference", "so the row needs a column prompt"),
        ({"prompt": "a", "completion": [turn("assistant", "b")]}, "demonstration", "text and the other messages"),
        ({"prompt": [turn("user", "a")], "completion": [turn("user", "b")]}, "demonstration", "begins with a user"),
        ({"messages": [turn("assistant", "b")]}, "demonstration", "begins with the assistant"),
        ({"messages": [turn("user", "b"), turn("assistant", "c"), turn("user", "d")]}, "demonstration", "ends with a"),
        ({"chosen": [turn("user", "a")], "rejected": [turn("user", "b")]}, "preference", "begin with different"),
        (
            {"chosen": [turn("user", "a"), turn("user", "c")], "rejected": [turn("user", "a"), turn("user", "d")]},
            "preference",
            "chosen goes on with a user message",
        ),
    ],
)
def test_rows_that_lack_what_is_recorded_are_named(tmp_path: Path, row: dict[str, Any], kind: str, message: str):
    with pytest.raises(UserError, match=rf"rows\.jsonl line 1: .*{message}"):
        load(tmp_path, [row], kind)


def test_too_long_responses_are_refused_or_dropped_and_never_cut(tmp_path: Path):
    rows = [{"prompt": "a", "completion": "x" * length} for length in (2, 40, 3, 50)]
    with pytest.raises(UserError, match=r"2 of 4 prompts with their responses exceed 20 tokens, first row 1 \(42 "):
        load(tmp_path, rows, "demonstration", max_tokens=20)
    found = load(tmp_path, rows, "demonstration", max_tokens=20, too_long="drop")
    assert [len(prompt.recorded[0].token_ids) for prompt in found.prompts] == [3, 4]
    assert [(entry.row, entry.where.rpartition("/")[2]) for entry in found.dropped] == [
        (1, "rows.jsonl line 2"),
        (3, "rows.jsonl line 4"),
    ]
    assert "42 tokens in all, over 20" in found.dropped[0].reason
    # null: the model's context, where it is known.
    assert len(load(tmp_path, rows, "demonstration").prompts) == 4
    with pytest.raises(UserError, match="exceed 50 tokens"):
        load(tmp_path, rows, "demonstration", context_length=50)


def test_preferences_without_a_difference_are_dropped_and_said(tmp_path: Path):
    rows = [{"prompt": "a", "chosen": "b", "rejected": "b"}, {"prompt": "a", "chosen": "b", "rejected": "c"}]
    found = load(tmp_path, rows, "preference")
    assert [prompt.index for prompt in found.prompts] == [1]
    assert found.dropped[0].reason == "chosen and rejected are the same"
    with pytest.raises(UserError, match="no row is left of 1"):
        load(tmp_path, rows[:1], "preference")


def test_notes_say_what_a_person_should_know_of_recorded_rows(tmp_path: Path):
    rows = [{"prompt": [turn("user", "a")], "completion": [turn("assistant", "")]}]
    assert any("1 recorded responses are empty" in note for note in load(tmp_path, rows, "demonstration").notes)
    unused = load(tmp_path, DEMONSTRATIONS, None)
    assert any("2 rows bring recorded responses, which are not used" in note for note in unused.notes)
    assert all(prompt.recorded == () for prompt in unused.prompts)


def test_an_end_of_turn_that_is_not_the_tokenizers_is_said(tmp_path: Path):
    tokenizer = make_tokenizer(600)
    tokenizer.eos_token = "<|endoftext|>"
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(DEMONSTRATIONS[1]) + "\n")
    source = DataSourceConfig(source=str(path))
    found = load_prompts(source, tokenizer, data=DataConfig(train=source), recorded="demonstration")
    assert any("recorded turns end with '<|im_end|>' (2)" in note for note in found.notes)


def test_sums_bring_the_right_number_and_a_wrong_one_near_it():
    source = DataSourceConfig(source="sums", args={"recorded": "preference", "high": 5, "num_val": 3})
    found = load_prompts(source, TOKENIZER, data=DataConfig(train=source), recorded="preference")
    for prompt in found.prompts:
        chosen, rejected = (TOKENIZER.decode(r.token_ids.tolist()[:-1]) for r in prompt.recorded)
        assert chosen == prompt.ground_truth
        assert 0 < abs(int(rejected) - int(chosen)) <= 10
    source = DataSourceConfig(source="sums", args={"recorded": "demonstration", "high": 5, "num_val": 3})
    found = load_prompts(source, TOKENIZER, data=DataConfig(train=source), recorded="demonstration")
    assert all(learned(prompt.recorded[0]) == [prompt.ground_truth + "<|im_end|>"] for prompt in found.prompts)
