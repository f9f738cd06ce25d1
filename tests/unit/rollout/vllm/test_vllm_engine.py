"""vLLM in this process: its draws are the native engine's, and the process is afterwards as it was before."""

import importlib.util
import random

import numpy as np
import pytest
import torch

from tranship.rollout.native.sampling import draw
from tranship.rollout.vllm import VllmEngine
from tranship.rollout.vllm.draws import Batch, Row
from tranship.types import RunError, SampleId, Sampling, UserError

from .conftest import SETTINGS


@pytest.mark.parametrize(
    "how",
    [{}, {"temperature": 0.0}, {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.01}],
    ids=str,
)
def test_the_same_weights_and_seeds_give_the_native_engines_responses(vllm_lab, how):
    requests = [vllm_lab.group(0, **how), vllm_lab.group(1, 3, cap=30, **how)]
    wanted = vllm_lab.run(vllm_lab.native(), *requests)
    done = vllm_lab.run(vllm_lab.engine(), *requests)
    assert done.keys() == wanted.keys()
    for sample, response in done.items():
        assert response.token_ids.tolist() == wanted[sample].token_ids.tolist()
        assert np.abs(response.logprobs - wanted[sample].logprobs).max() <= 1e-5


def test_an_interrupted_response_goes_on_as_if_it_had_not_stopped(vllm_lab):
    whole = vllm_lab.run(vllm_lab.engine(), vllm_lab.group(0, cap=20))
    engine = vllm_lab.engine()
    engine.submit(vllm_lab.group(0, cap=20))
    for _ in range(7):
        engine.step()
    partials = {response.sample: response for response in engine.abort()}
    for sample, response in vllm_lab.run(engine, vllm_lab.group(0, cap=20, partials=partials)).items():
        assert len(partials[sample].token_ids) == 7
        assert response.token_ids.tolist() == whole[sample].token_ids.tolist()


def test_a_prompt_that_is_prefilled_in_parts_is_sampled_from_once(vllm_lab):
    """More prompt tokens wait than one step of vLLM takes (2048)."""
    engine = vllm_lab.engine(max_running=12)
    groups = [vllm_lab.group(n, 1, cap=4, prompt=vllm_lab.prompt(380, seed=n)) for n in range(12)]
    done = vllm_lab.run(engine, *groups)
    wanted = vllm_lab.run(vllm_lab.native(), *groups)
    for sample, response in done.items():
        assert response.token_ids.tolist() == wanted[sample].token_ids.tolist()


def test_a_probe_disturbs_nothing_that_runs(vllm_lab):
    calm = vllm_lab.run(vllm_lab.engine(), vllm_lab.group(0))
    engine = vllm_lab.engine()
    engine.submit(vllm_lab.group(0))
    engine.step()
    probed = engine.probe(vllm_lab.prompt(6), 0.7)
    assert np.abs(probed - vllm_lab.native().probe(vllm_lab.prompt(6), 0.7)).max() <= 1e-5
    done = vllm_lab.run(engine)
    assert done.keys() == calm.keys()
    for sample, response in done.items():
        assert response.token_ids.tolist() == calm[sample].token_ids.tolist()


def test_the_process_keeps_its_random_numbers_and_threads(vllm_lab):
    threads = torch.get_num_threads()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    wanted = (random.random(), np.random.rand(), float(torch.rand(1)))
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    engine = vllm_lab.engine()
    assert (random.random(), np.random.rand(), float(torch.rand(1))) == wanted
    assert torch.get_num_threads() == threads
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)
    assert len(vllm_lab.run(engine, vllm_lab.group())) == 4


def test_an_engine_that_is_dropped_leaves_the_others_working(vllm_lab):
    first, second = vllm_lab.engine(), vllm_lab.engine()
    del first
    assert len(vllm_lab.run(second, vllm_lab.group())) == 4
    del second
    assert len(vllm_lab.run(vllm_lab.engine(), vllm_lab.group())) == 4


def test_what_it_cannot_do_is_refused_at_the_start(vllm_lab):
    for settings, message in (
        ({"deterministic": True}, "rollout.engine=native"),
        ({"device": "cuda"}, "this build of vLLM is for cpu"),
        ({"max_tokens": 5000}, "context of 2048"),
    ):
        with pytest.raises(UserError, match=message):
            vllm_lab.engine(version=-1, **settings)
    with pytest.raises(UserError, match=r"no model\.safetensors"):
        vllm_lab.engine(_without_weights(vllm_lab), version=-1)


def _without_weights(lab):
    folder = lab.folder().parent / "empty"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes((lab.folder() / "config.json").read_bytes())
    return folder


def test_without_vllm_the_remedy_is_named(tmp_path, monkeypatch):
    from tranship.models.tiny import make_tiny

    folder = make_tiny(tmp_path / "m", vocab_size=320, hidden=32, layers=1)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "vllm" else found(name, *rest))
    with pytest.raises(UserError, match="not installed: pip install vllm"):
        VllmEngine(folder, **SETTINGS)


def rows_of(count, forced=None, **sampling):
    return [
        Row(SampleId(0, n), np.arange(3, dtype=np.int32), n, Sampling(9, **sampling), forced=forced)
        for n in range(count)
    ]


def test_a_batch_draws_as_the_sampler_does_and_leaves_one_choice():
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    rows = rows_of(5, temperature=0.8)
    rows[2].tokens = [1, 2]
    batch = Batch(rows)
    tokens, logprobs = draw(logits.clone(), batch._how)
    position = batch._how.position.copy()
    changed = batch.draw(logits.clone())
    assert changed.argmax(-1).tolist() == [row.drawn[0] for row in rows]
    assert position.tolist() == [0, 0, 0, 0, 0]
    assert batch._how.position.tolist() == [0, 0, 2, 0, 0]
    for place in (0, 1, 3, 4):
        assert rows[place].drawn == (int(tokens[place]), float(logprobs[place]))


def test_prescribed_tokens_get_their_logprob_at_the_temperature():
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(0))
    (row,) = rows_of(1, np.array([17, 5], np.int32), temperature=0.5)
    row.tokens = [17]
    assert int(Batch([row]).draw(logits.clone()).argmax()) == 5
    assert row.drawn == (5, pytest.approx(float(torch.log_softmax(logits[0] / 0.5, -1)[5]), abs=1e-6))


def test_a_row_that_is_not_finite_is_seen_and_another_choice_of_vllm_is_refused():
    logits = torch.randn(2, 300)
    logits[1] = float("nan")
    rows = rows_of(2)
    chosen = Batch(rows).draw(logits).argmax(-1)
    assert [row.broken for row in rows] == [False, True]
    assert int(chosen[1]) == rows[1].drawn[0]
    with pytest.raises(RunError, match="was drawn"):
        rows[0].take(int(chosen[0]) + 1, 0)
    rows[0].take(int(chosen[0]), 4)
    assert rows[0].response("abort").policy_versions.tolist() == [4]
    with pytest.raises(RunError, match="was drawn"):
        rows[0].take(int(chosen[0]), 4)
