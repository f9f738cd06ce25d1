"""How responses end: end-of-text ids, the cap, and what was never sampled is never added."""

import numpy as np
import pytest

from tranship.types import SampleId


@pytest.fixture(scope="module")
def free_run(lab):
    """A prompt, and the tokens that sample 0 of group 0 draws when nothing ends it."""
    prompt = lab.prompt(21)
    done = lab.run(lab.engine(ignore_eos=True), lab.group(0, prompt, count=1, max_response_tokens=12))
    return prompt, done[SampleId(0, 0)].token_ids


def only(lab, prompt, ends, cap=12, stops=(), **settings):
    engine = lab.engine(eos_token_ids=ends, **({"ignore_eos": False} | settings))
    request = lab.group(0, prompt, count=1, max_response_tokens=cap, stop_token_ids=stops)
    return lab.run(engine, request)[SampleId(0, 0)]


def first_place(tokens, token):
    return int(np.flatnonzero(tokens == token)[0])


def test_any_of_several_end_ids_ends_and_is_kept_with_its_logprob(lab, free_run):
    prompt, tokens = free_run
    for place in (0, 3, 5):
        token = int(tokens[place])
        unused = next(t for t in range(lab.vocab) if t not in tokens)
        response = only(lab, prompt, (unused, token))
        length = first_place(tokens, token) + 1
        assert response.token_ids.tolist() == tokens[:length].tolist()
        assert response.finish_reason == "stop"
        assert len(response.logprobs) == length
        assert response.logprobs[-1] < 0


def test_no_end_within_the_cap_is_length_and_no_end_is_invented(lab, free_run):
    prompt, tokens = free_run
    unused = next(t for t in range(lab.vocab) if t not in tokens)
    response = only(lab, prompt, (unused,), cap=6)
    assert response.token_ids.tolist() == tokens[:6].tolist()
    assert response.finish_reason == "length"


def test_an_end_as_the_last_allowed_token_is_stop(lab, free_run):
    prompt, tokens = free_run
    place = next(p for p in range(3, 12) if tokens[p] not in tokens[:p])
    response = only(lab, prompt, (int(tokens[place]),), cap=place + 1)
    assert response.token_ids.tolist() == tokens[: place + 1].tolist()
    assert response.finish_reason == "stop"
    assert only(lab, prompt, (int(tokens[place]),), cap=place).finish_reason == "length"


def test_a_cap_of_one_token(lab, free_run):
    prompt, tokens = free_run
    response = only(lab, prompt, (), cap=1)
    assert response.token_ids.tolist() == tokens[:1].tolist()
    assert response.finish_reason == "length"


def test_stop_ids_of_the_request_end_too_and_ignore_eos_ignores_all(lab, free_run):
    prompt, tokens = free_run
    token = int(tokens[4])
    response = only(lab, prompt, (), stops=(token,))
    assert response.token_ids.tolist() == tokens[: first_place(tokens, token) + 1].tolist()
    assert response.finish_reason == "stop"
    response = only(lab, prompt, (token,), stops=(token,), ignore_eos=True)
    assert response.token_ids.tolist() == tokens.tolist()
    assert response.finish_reason == "length"
