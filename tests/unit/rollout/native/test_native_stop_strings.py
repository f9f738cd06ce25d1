"""A stop string is found by the end of a response alone, at the token that completes it."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tranship.models.tiny import make_tokenizer
from tranship.rollout.native.stop_strings import text_ended

TOKENIZER = make_tokenizer(600)


@settings(max_examples=150, deadline=None)
@given(st.text("abt en.é語", min_size=0, max_size=60), st.text("abt en.é語", min_size=1, max_size=5))
def test_the_end_of_a_response_is_enough(text, string):
    ids = np.array(TOKENIZER.encode(text, add_special_tokens=False), np.int32)
    found = None
    for count in range(1, len(ids) + 1):
        if found is None and text_ended(ids[:count], (string, "never this"), TOKENIZER.decode):
            found = count
    wanted = [n for n in range(1, len(ids) + 1) if string in TOKENIZER.decode(ids[:n])]
    assert found == (wanted[0] if wanted else None)


def test_a_special_token_is_text():
    ids = np.array(TOKENIZER.encode("ab<|im_end|>", add_special_tokens=False), np.int32)
    assert text_ended(ids, ("<|im_end|>",), TOKENIZER.decode)
    assert not text_ended(ids[:-1], ("<|im_end|>",), TOKENIZER.decode)
