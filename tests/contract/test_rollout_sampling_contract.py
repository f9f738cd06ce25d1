"""How every rollout engine of the table draws: neutral by default, as it was asked to, its log-probs, its ends."""

import json

import numpy as np
import pytest

from tests.contract.rollout_lab import PROMPT, VOCAB, group, next_logits, one, reference, run, update
from tranship.types import SampleId, UserError

COUNT = 6000


@pytest.fixture(scope="module")
def logits(rollout_folders):
    return next_logits(rollout_folders[0])


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def cut(probs, top_k=0, top_p=1.0, min_p=0.0):
    """What is left of a distribution, one token after the other: top-k, then top-p of that, then min-p."""
    order = np.argsort(-probs)[: top_k or len(probs)]
    total, mass, kept = probs[order].sum(), 0.0, []
    for token in order:
        if mass < top_p * total and probs[token] >= min_p * probs[order[0]]:
            kept.append(token)
        mass += probs[token]
    left = np.zeros_like(probs)
    left[kept] = probs[kept] / probs[kept].sum()
    return left


def first_tokens(engine, **sampling):
    done = run(engine, group(0, COUNT, cap=1, **sampling))
    return np.array([response.token_ids[0] for response in done.values()])


def check_frequencies(tokens, wanted):
    """Pearson's chi-square over the tokens that are expected five times or more; the others are one class."""
    seen, expected = np.bincount(tokens, minlength=VOCAB), wanted * len(tokens)
    assert seen[wanted == 0].sum() == 0
    rare = expected < 5
    seen = np.append(seen[~rare], seen[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    seen, expected = seen[expected > 0], expected[expected > 0]
    chi, freedom = float(((seen - expected) ** 2 / expected).sum()), len(seen) - 1
    assert chi < freedom + 4.5 * np.sqrt(2 * freedom) + 5, (chi, freedom)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_k": 6},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"temperature": 1.4, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
    ],
    ids=str,
)
def test_tokens_follow_the_distribution_that_was_asked_for(make_rollout, logits, how):
    cuts = {name: value for name, value in how.items() if name != "temperature"}
    wanted = cut(softmax(logits / how.get("temperature", 1.0)), **cuts)
    check_frequencies(first_tokens(make_rollout(max_running=256, ignore_eos=True), **how), wanted)


def test_the_check_of_frequencies_can_fail(logits):
    tokens = np.random.default_rng(0).choice(VOCAB, COUNT, p=softmax(logits / 0.85))
    with pytest.raises(AssertionError):
        check_frequencies(tokens, softmax(logits))


def test_nothing_is_inherited_from_the_models_generation_settings(make_rollout, rollout_folders):
    """They say temperature 0.2, top-k 3, top-p 0.4 and ends at 7 and 9; the test of distributions sees the first."""
    settings = json.loads((rollout_folders[0] / "generation_config.json").read_text())
    assert (settings["temperature"], settings["top_k"], settings["eos_token_id"]) == (0.2, 3, [7, 9])
    done = run(make_rollout(max_running=64), group(0, 400, cap=30))
    seen = np.concatenate([response.token_ids for response in done.values()])
    assert {7, 9} <= set(seen[:-1].tolist())
    for response in done.values():
        assert (response.finish_reason == "stop") == (response.token_ids[-1] == 1)


def test_logprobs_are_of_the_distribution_at_the_temperature_before_any_cut(make_rollout, rollout_folders, logits):
    """The convention of `Sampling`: scaled by temperature, not renormalised over what the cuts leave."""
    how = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.05}
    raw = softmax(logits / 0.7)
    processed = cut(raw, 5, 0.9, 0.05)
    for response in run(make_rollout(), group(0, cap=8, **how)).values():
        wanted = reference(rollout_folders[0], response.token_ids, 0.7)
        assert np.abs(response.logprobs - wanted).max() <= 1e-4
        first = response.token_ids[0]
        assert abs(response.logprobs[0] - np.log(raw[first])) <= 1e-4
        assert abs(response.logprobs[0] - np.log(processed[first])) > 0.1


def test_the_likeliest_tokens_are_told_to_those_who_ask(make_rollout, rollout_folders):
    engine = make_rollout(max_running=3)
    asked, others = group(0, 2, cap=8, temperature=0.7, top_k=5, top_logprobs=4), group(1, 4, cap=5)
    done = run(engine, asked, others)
    for sample in others.samples:
        assert done[sample].top is None
    for sample in asked.samples:
        response = done[sample]
        length = len(response.token_ids)
        assert response.top.token_ids.shape == response.top.logprobs.shape == (length, 4)
        for place in range(length):
            before = np.concatenate([PROMPT, response.token_ids[:place]])
            logprobs = np.log(softmax(next_logits(rollout_folders[0], before) / 0.7))
            order = np.argsort(-logprobs)[:4]
            assert np.array_equal(response.top.token_ids[place], order)
            assert np.abs(response.top.logprobs[place] - logprobs[order]).max() <= 1e-4


def test_likeliest_tokens_go_on_with_an_interrupted_response(make_rollout):
    engine = make_rollout(max_running=4, ignore_eos=True)
    request = group(0, 2, cap=12, top_logprobs=3)
    whole = run(engine, request)
    engine.submit(request)
    for _ in range(5):
        assert not engine.step()
    (peeked, _) = engine.peek(dict.fromkeys(request.samples, 2))
    assert np.array_equal(peeked.top.token_ids, whole[peeked.sample].top.token_ids[2 : 2 + len(peeked.token_ids)])
    partials = {response.sample: response for response in engine.abort()}
    done = run(engine, group(0, 2, cap=12, top_logprobs=3, partials=partials))
    for sample, response in whole.items():
        assert np.array_equal(done[sample].top.token_ids, response.top.token_ids)
    with pytest.raises(UserError, match="top_logprobs is 2: ask for as many as before"):
        engine.submit(group(0, 2, cap=12, top_logprobs=2, partials=partials))
    with pytest.raises(UserError, match="top_logprobs=321"):
        engine.submit(group(0, 2, cap=12, top_logprobs=321))


def test_greedy_takes_the_likeliest_and_reports_temperature_one(make_rollout, rollout_folders, logits):
    done = run(make_rollout(), group(0, 2, cap=12, temperature=0.0))
    first, second = done[SampleId(0, 0)], done[SampleId(0, 1)]
    assert np.array_equal(first.token_ids, second.token_ids)
    assert first.token_ids[0] == logits.argmax()
    assert np.abs(first.logprobs - reference(rollout_folders[0], first.token_ids)).max() <= 1e-4


def test_any_of_several_ids_ends_a_response_and_stays_in_it(make_rollout):
    free = run(make_rollout(ignore_eos=True), group(0, cap=40))
    stops = tuple(int(free[SampleId(0, index)].token_ids[5 + index]) for index in range(3))
    done = run(make_rollout(eos_token_ids=stops[:1]), group(0, cap=40, stop_token_ids=stops[1:]))
    for sample, response in done.items():
        whole = free[sample].token_ids
        ends = np.flatnonzero(np.isin(whole, stops))
        length = ends[0] + 1 if len(ends) else 40
        assert np.array_equal(response.token_ids, whole[:length])
        assert response.finish_reason == ("stop" if len(ends) else "length")
    assert sum(response.finish_reason == "stop" for response in done.values()) >= 3


def test_a_sample_draws_by_its_own_seed(make_rollout):
    """Whatever group it is asked in, and however many are asked with it."""
    together = run(make_rollout(max_running=8), group(0, 6, cap=12))
    assert len({response.token_ids.tobytes() for response in together.values()}) == 6
    alone = run(make_rollout(), one(group(0, 6, cap=12), 4))
    assert np.array_equal(alone[SampleId(0, 4)].token_ids, together[SampleId(0, 4)].token_ids)
    other = run(make_rollout(), group(1, 6, cap=12))
    assert not np.array_equal(other[SampleId(1, 4)].token_ids, together[SampleId(0, 4)].token_ids)


def test_samples_of_one_batch_may_be_drawn_differently(make_rollout, logits):
    engine = make_rollout(max_running=64, ignore_eos=True)
    requests = [group(0, 3, cap=1, temperature=0.0), group(1, 1000, cap=1, top_k=2), group(2, 1000, cap=1)]
    done = run(engine, *requests)
    by_group = {number: [r.token_ids[0] for s, r in done.items() if s.group_id == number] for number in range(3)}
    likeliest = np.argsort(-logits)
    assert set(by_group[0]) == {likeliest[0]}
    assert set(by_group[1]) == set(likeliest[:2].tolist())
    assert len(set(by_group[2])) > 20


def test_other_weights_draw_other_tokens(make_rollout, rollout_folders):
    engine = make_rollout()
    before = run(engine, group(0))
    update(engine, rollout_folders[1], 1)
    after = run(engine, group(0))
    assert all(not np.array_equal(after[sample].token_ids, before[sample].token_ids) for sample in before)


def letters(ids):
    """Every id as two letters: a decode function that a stop string may cross the tokens of."""
    return "".join(chr(97 + token // 26) + chr(97 + token % 26) for token in ids)


def test_a_stop_string_ends_a_response_with_the_token_that_completes_it(make_rollout):
    free = run(make_rollout(ignore_eos=True), group(0, cap=40))
    # Within the text of the first sample's tokens 6, 7 and 8, from the middle of a token to the middle of another.
    string = letters(free[SampleId(0, 0)].token_ids[6:9])[1:-1]
    engine = make_rollout(decode=letters, eos_token_ids=())
    done = run(engine, group(0, cap=40, stop_strings=("zz!", string)), group(1, cap=6))
    for sample, response in done.items():
        if sample.group_id == 1:
            assert response.finish_reason == "length"
            continue
        whole = free[sample].token_ids
        ends = [n for n in range(1, 41) if string in letters(whole[:n])]
        length = ends[0] if ends else 40
        assert np.array_equal(response.token_ids, whole[:length])
        assert response.finish_reason == ("stop" if ends else "length")
    assert len(done[SampleId(0, 0)].token_ids) <= 9


def test_stop_strings_without_a_tokenizer_and_empty_ones_are_refused(make_rollout):
    with pytest.raises(UserError, match="stop_strings"):
        make_rollout().submit(group(0, stop_strings=("end",)))
    with pytest.raises(UserError, match="empty string"):
        make_rollout(decode=letters).submit(group(0, stop_strings=("end", "")))
