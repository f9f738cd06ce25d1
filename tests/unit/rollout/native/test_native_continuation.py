"""A request that goes on after a finished response: only its new tokens are prefilled, and nothing else differs."""

from dataclasses import replace

import numpy as np
import pytest

from tranship.rollout.native import load_folder
from tranship.rollout.native.finished import FinishedCache
from tranship.types import SampleId

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3")


def going_on(request):
    return replace(request, goes_on=True)


def turns(lab, engine, num_samples, num_turns, cap=9, goes_on=True):
    """Conversations of several turns from one prompt: (prompt, response) of every turn, in the order of the samples."""
    # With this one no router of a family here is near a tie, where rounding would choose another expert.
    prompts = [lab.prompt(4, 40)] * num_samples
    said = []
    for turn in range(num_turns):
        requests = (
            [lab.group(0, prompts[0], num_samples, max_response_tokens=cap)]
            if turn == 0
            else [lab.group(turn, prompts[i], 1, first=i, max_response_tokens=cap) for i in range(num_samples)]
        )
        done = lab.run(engine, *[replace(request, goes_on=goes_on) for request in requests])
        responses = [done[SampleId(turn, index)] for index in range(num_samples)]
        said += list(zip(prompts, responses, strict=True))
        prompts = [
            np.concatenate([prompt, response.token_ids, lab.prompt(100 * turn + index, 6)])
            for index, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
        ]
    return said


@pytest.mark.parametrize("family", FAMILIES)
def test_each_turn_is_as_after_a_whole_prefill(lab, prefilled, family):
    folder = lab.folder(family)
    engine, fresh = lab.engine(folder), lab.engine(folder)
    sizes, whole = prefilled(engine), prefilled(fresh)
    ours, theirs = turns(lab, engine, 3, 4), turns(lab, fresh, 3, 4, goes_on=False)
    for (prompt, response), (_, other) in zip(ours, theirs, strict=True):
        assert np.array_equal(response.token_ids, other.token_ids)
        assert np.abs(response.logprobs - other.logprobs).max() <= 1e-5
        assert np.abs(lab.reference(folder, prompt, response.token_ids) - response.logprobs).max() <= 1e-4
    assert sizes == [40] + [1 + 6] * 9, "the last token of a response, and what follows it"
    assert sum(whole) > 4 * sum(sizes)


def test_more_of_one_conversation_at_a_time_and_other_prompts_beside(lab, prefilled):
    folder = lab.folder()
    engine = lab.engine(folder)
    sizes = prefilled(engine)
    prompt, other = lab.prompt(1, 30), lab.prompt(2, 25)
    (first,) = lab.run(engine, going_on(lab.group(0, prompt, 1, max_response_tokens=8))).values()
    longer = np.concatenate([prompt, first.token_ids, other])
    requests = [lab.group(1, longer, 2), lab.group(2, longer, 2), lab.group(3, prompt, 2), lab.group(4, other, 1)]
    for sample, response in lab.run(engine, *requests).items():
        wanted = lab.reference(folder, requests[sample.group_id - 1].prompt_ids, response.token_ids)
        assert np.abs(response.logprobs - wanted).max() <= 1e-4
    assert sorted(sizes) == sorted([30, 25 + 1, len(longer), 30, 25])


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
def test_an_update_forgets_what_was_kept(lab, prefilled, on_update):
    old, new = lab.folder(), lab.folder(weights_seed=1)
    engine = lab.engine(old, on_update=on_update)
    prompt = lab.prompt(1, 30)
    (first,) = lab.run(engine, going_on(lab.group(0, prompt, 1, max_response_tokens=8))).values()
    load_folder(engine, new, 1)
    sizes = prefilled(engine)
    longer = np.concatenate([prompt, first.token_ids, lab.prompt(2, 6)])
    (second,) = lab.run(engine, lab.group(1, longer, 1)).values()
    assert sizes == [len(longer)]
    assert np.abs(second.logprobs - lab.reference(new, longer, second.token_ids)).max() <= 1e-4


@pytest.mark.parametrize(("on_update", "reused"), [("recompute", True), ("keep", False)])
def test_a_response_under_two_versions_is_kept_where_its_cache_is_of_one(lab, prefilled, on_update, reused):
    old, new = lab.folder(), lab.folder(weights_seed=1)
    engine = lab.engine(old, on_update=on_update)
    prompt = lab.prompt(1, 30)
    engine.submit(going_on(lab.group(0, prompt, 1, max_response_tokens=8)))
    for _ in range(3):
        engine.step()
    load_folder(engine, new, 1)
    (first,) = lab.run(engine).values()
    assert set(first.policy_versions.tolist()) == {0, 1}
    sizes = prefilled(engine)
    longer = np.concatenate([prompt, first.token_ids, lab.prompt(2, 6)])
    (second,) = lab.run(engine, lab.group(1, longer, 1)).values()
    assert sizes == [7 if reused else len(longer)]
    assert np.abs(second.logprobs - lab.reference(new, longer, second.token_ids)).max() <= 1e-4


def test_in_deterministic_mode_every_prompt_is_prefilled_whole(lab, prefilled):
    engine = lab.engine(deterministic=True)
    sizes = prefilled(engine)
    said = turns(lab, engine, 1, 3)
    assert sizes == [len(prompt) for prompt, _ in said]


def test_what_is_kept_is_bounded_and_goes_with_sleep(lab):
    engine = lab.engine(max_running=3)
    for group in range(5):
        lab.run(engine, going_on(lab.group(group, lab.prompt(group, 20), 2)))
    assert len(engine._batch._finished) == 3
    engine.sleep()
    assert len(engine._batch._finished) == 0


def test_requests_that_end_keep_nothing(lab):
    engine = lab.engine()
    lab.run(engine, lab.group(0, lab.prompt(1)))
    assert len(engine._batch._finished) == 0


def test_the_longest_beginning_is_taken_and_leaves_a_token():
    cache = FinishedCache(4)
    kept = {length: np.arange(length, dtype=np.int32) for length in (3, 5, 8)}
    for ids in kept.values():
        cache.add(ids, [])
    cache.add(np.array([0, 1, 9], np.int32), [])
    assert cache.take(np.arange(8, dtype=np.int32)).start == 5
    assert cache.take(np.arange(8, dtype=np.int32)).start == 3
    assert cache.take(np.arange(8, dtype=np.int32)).past is None
    assert cache.take(np.array([0, 1, 9, 4], np.int32)).token_ids.tolist() == [4]
    assert len(cache) == 1
