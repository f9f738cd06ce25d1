"""Requests: seeds, slots, aborts, partials, and what is refused."""

import dataclasses

import numpy as np
import pytest
import torch

from tranship.rollout import SamplesFailed
from tranship.types import Response, SampleId, UserError


def test_seeds_differ_within_a_group_and_repeat_across_runs(lab):
    prompt = lab.prompt(1)
    done = lab.run(lab.engine(), lab.group(0, prompt, count=6))
    again = lab.run(lab.engine(), lab.group(0, prompt, count=6))
    assert len({response.token_ids.tobytes() for response in done.values()}) == 6
    for sample, response in done.items():
        assert again[sample].token_ids.tolist() == response.token_ids.tolist()
    other = lab.run(lab.engine(), lab.group(0, prompt, count=6, seed=1))
    assert all(other[sample].token_ids.tolist() != done[sample].token_ids.tolist() for sample in done)


def test_a_group_larger_than_the_slots_runs_in_full(lab):
    engine = lab.engine(max_running=3)
    done = lab.run(engine, lab.group(0, lab.prompt(1), count=8), lab.group(1, lab.prompt(2), count=5))
    assert len(done) == 13
    assert all(len(response.token_ids) == 24 for response in done.values())
    assert engine.num_free == 3


def test_a_prompt_is_prefilled_once_for_its_group(lab, prefilled):
    engine = lab.engine(max_running=3)
    seen = prefilled(engine)
    lab.run(engine, lab.group(0, lab.prompt(1, 11), count=8), lab.group(1, lab.prompt(2, 13), count=2))
    assert sorted(seen) == [11, 13]


def test_counts_of_unfinished_and_free(lab):
    engine = lab.engine(max_running=6)
    assert (engine.num_unfinished, engine.num_free) == (0, 6)
    assert engine.step() == []
    engine.submit(lab.group(0, lab.prompt(1), count=4))
    assert (engine.num_unfinished, engine.num_free) == (4, 2)
    engine.submit(lab.group(1, lab.prompt(2), count=4))
    assert (engine.num_unfinished, engine.num_free) == (8, 0)
    engine.step()
    assert (engine.num_unfinished, engine.num_free) == (8, 0)
    engine.abort()
    assert (engine.num_unfinished, engine.num_free) == (0, 6)


def test_abort_returns_partial_output_of_running_and_waiting_samples(lab):
    prompt = lab.prompt(4)
    whole = lab.run(lab.engine(), lab.group(0, prompt, count=8))
    engine = lab.engine()
    engine.submit(lab.group(0, prompt, count=8))
    for _ in range(5):
        engine.step()
    some = engine.abort([SampleId(0, 1), SampleId(0, 7), SampleId(5, 0)])
    assert [response.sample for response in some] == [SampleId(0, 7), SampleId(0, 1)]
    rest = engine.abort()
    assert len(rest) == 6
    for response in (*some, *rest):
        tokens = whole[response.sample].token_ids
        assert response.finish_reason == "abort"
        assert response.token_ids.tolist() == tokens[: len(response.token_ids)].tolist()
    assert sorted(len(response.token_ids) for response in (*some, *rest)) == [0, 0] + [6] * 6


@pytest.mark.parametrize("deterministic", [False, True])
def test_partials_go_on_where_they_stopped(lab, deterministic):
    prompt, folder = lab.prompt(4), lab.folder("qwen3")
    whole = lab.run(lab.engine(folder, deterministic=deterministic), lab.group(0, prompt))
    engine = lab.engine(folder, deterministic=deterministic, version=7)
    engine.submit(lab.group(0, prompt))
    for _ in range(9):
        engine.step()
    partials = {response.sample: response for response in engine.abort()}
    partials[SampleId(0, 2)] = dataclasses.replace(
        partials[SampleId(0, 2)],
        token_ids=partials[SampleId(0, 2)].token_ids[:1],
        logprobs=partials[SampleId(0, 2)].logprobs[:1] - 3,
        policy_versions=partials[SampleId(0, 2)].policy_versions[:1] - 4,
    )
    del partials[SampleId(0, 3)]
    done = lab.run(engine, lab.group(0, prompt, partials=partials))
    for sample, response in done.items():
        assert response.token_ids.tolist() == whole[sample].token_ids.tolist()
        assert np.abs(response.logprobs - whole[sample].logprobs)[1:].max() < 1e-4
    assert done[SampleId(0, 2)].policy_versions.tolist() == [3] + [7] * 23
    assert done[SampleId(0, 2)].logprobs[0] == partials[SampleId(0, 2)].logprobs[0]


def test_partials_that_had_ended_come_back_as_they_are(lab):
    engine = lab.engine(ignore_eos=False, eos_token_ids=(9,))
    versions, logprobs = np.zeros(3, np.int32), np.full(3, -1.0, np.float32)
    partials = {
        SampleId(0, 0): Response(SampleId(0, 0), np.array([1, 2, 9], np.int32), logprobs, versions, "abort"),
        SampleId(0, 1): Response(SampleId(0, 1), np.array([1, 2, 3], np.int32), logprobs, versions, "abort"),
    }
    engine.submit(lab.group(0, lab.prompt(1), count=2, partials=partials, max_response_tokens=3))
    assert engine.num_unfinished == 2
    done = {response.sample.sample_index: response for response in engine.step()}
    assert engine.num_unfinished == 0
    assert [done[index].finish_reason for index in range(2)] == ["stop", "length"]
    assert [done[index].token_ids.tolist() for index in range(2)] == [[1, 2, 9], [1, 2, 3]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": []}, "at least one token"),
        ({"prompt": [3, 521]}, "token id 521"),
        ({"prompt": [3, -1]}, "token id -1"),
        ({"prompt": [1] * 277}, "301 tokens, but the engine holds 300"),
        ({"max_response_tokens": 0}, "max_response_tokens=0"),
        ({"temperature": -0.5}, "temperature=-0.5"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_k": -1}, "top_k=-1"),
        ({"min_p": 1.0}, "min_p=1.0"),
    ],
)
def test_what_cannot_run_is_refused_and_the_others_run_on(lab, change, message):
    engine = lab.engine()
    engine.submit(lab.group(0, lab.prompt(1)))
    with pytest.raises(UserError, match=message):
        engine.submit(lab.group(1, **({"prompt": [1, 2]} | change)))
    assert len(lab.run(engine)) == 4


def test_a_sample_that_runs_is_not_taken_twice_and_seeds_must_match(lab):
    engine = lab.engine()
    engine.submit(lab.group(0, lab.prompt(1)))
    with pytest.raises(UserError, match="running already"):
        engine.submit(lab.group(0, lab.prompt(1), count=1))
    with pytest.raises(UserError, match="2 seeds"):
        engine.submit(dataclasses.replace(lab.group(1, lab.prompt(1)), seeds=(1, 2)))
    assert engine.num_unfinished == 4
    name, one = SampleId(2, 0), np.ones(1, np.int32)
    partials = {name: Response(name, one * 600, one.astype(np.float32), one, "abort")}
    with pytest.raises(UserError, match=r"partial response of .* token id 600"):
        engine.submit(lab.group(2, lab.prompt(1), count=1, partials=partials))
    assert len(lab.run(engine)) == 4


def test_broken_weights_drop_the_samples_that_met_them_by_name(lab):
    engine = lab.engine()
    engine.submit(lab.group(0, lab.prompt(1), count=2))
    engine.begin_update()
    engine.storage("norm").fill_(float("nan"))
    engine.finish_update(3)
    with pytest.raises(SamplesFailed, match=r"not finite at policy version 3.*\(0, 0, 0\)") as failed:
        engine.step()
    assert set(failed.value.samples) == {SampleId(0, 0), SampleId(0, 1)}
    assert engine.num_unfinished == 0


def test_a_token_with_a_broken_embedding_fails_alone(lab):
    folder = lab.folder(tied=False)
    engine = lab.engine(folder)
    with torch.no_grad():
        engine.storage("embed")[13] = float("nan")
    good, bad = lab.prompt(1), np.array([5, 13], np.int32)
    good[good == 13] = 12
    engine.submit(lab.group(0, good, top_k=1))
    engine.submit(lab.group(2, good, count=1, max_response_tokens=1))
    engine.submit(lab.group(1, bad, count=1))
    with pytest.raises(SamplesFailed, match=r"\(1, 0, 0\)") as failed:
        engine.step()
    assert failed.value.samples == (SampleId(1, 0),)
    done = lab.run(engine)
    assert len(done.pop(SampleId(2, 0)).token_ids) == 1
    alone = lab.run(lab.engine(folder), lab.group(0, good, top_k=1))
    assert {sample: response.token_ids.tolist() for sample, response in done.items()} == {
        sample: response.token_ids.tolist() for sample, response in alone.items()
    }
