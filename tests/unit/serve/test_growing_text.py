"""Text that grows token by token: its pieces add up to the whole, and nothing of a stop string is ever given away."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tranship.serve.text import GrowingText, TokenTexts, decoder

CHARACTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL = 256
# The character that stands for each byte in a byte-level vocabulary.
PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTE_CHARACTERS = {byte: chr(byte) for byte in PLAIN} | {
    byte: chr(256 + place) for place, byte in enumerate(b for b in range(256) if b not in PLAIN)
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and one special token: half characters and broken ones are everywhere."""
    made = Tokenizer(models.BPE(vocab={text: place for place, text in enumerate(CHARACTERS)}, merges=[]))
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=made)


@given(ids=st.lists(st.integers(0, SPECIAL), max_size=40), cuts=st.lists(st.integers(1, 5), min_size=1))
@settings(max_examples=300, deadline=None)
def test_pieces_add_up_to_the_whole(tokenizer: PreTrainedTokenizerFast, ids: list[int], cuts: list[int]) -> None:
    for skip in (True, False):
        decode = decoder(tokenizer, skip_special_tokens=skip)
        text, given, at = GrowingText(decode), "", 0
        while at < len(ids):
            size = cuts[at % len(cuts)]
            given += text.push(ids[at : at + size])
            assert decode(ids).startswith(given)
            at += size
        assert given + text.push([], last=True) == decode(ids)


@given(
    words=st.lists(st.sampled_from(["a", "b", "ab", "aab", "é", "€"]), max_size=20),
    stops=st.lists(st.sampled_from(["ab", "aab", "bb", "b€", "aaaa"]), min_size=1, max_size=3),
)
@settings(max_examples=300, deadline=None)
def test_text_ends_before_the_first_stop_string(
    tokenizer: PreTrainedTokenizerFast, words: list[str], stops: list[str]
) -> None:
    whole = "".join(words)
    found = [whole.find(stop) for stop in stops if stop in whole]
    expected = whole[: min(found)] if found else whole
    decode = decoder(tokenizer, skip_special_tokens=True)
    text, given = GrowingText(decode, stops), ""
    for byte in whole.encode():
        given += text.push([tokenizer.convert_tokens_to_ids(BYTE_CHARACTERS[byte])])
        assert expected.startswith(given)
    assert given + text.push([], last=True) == expected


def test_text_is_given_as_soon_as_it_is_certain(tokenizer: PreTrainedTokenizerFast) -> None:
    decode = decoder(tokenizer, skip_special_tokens=True)
    ids = [tokenizer.convert_tokens_to_ids(BYTE_CHARACTERS[byte]) for byte in "a€bcd".encode()]
    text = GrowingText(decode, ["bx"])
    assert [text.push([token]) for token in ids] == ["a", "", "", "€", "", "bc", "d"]


def test_single_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = TokenTexts(decoder(tokenizer, skip_special_tokens=False))
    first, second, _ = (tokenizer.convert_tokens_to_ids(BYTE_CHARACTERS[byte]) for byte in "€".encode())
    assert tokens.text(SPECIAL) == "<|end|>"
    assert tokens.utf8(tokenizer.convert_tokens_to_ids("a")) == [97]
    assert tokens.utf8(first) is None
    assert tokens.utf8(second) is None
