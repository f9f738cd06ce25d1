"""What every rollout engine of the table keeps to: requests, updates, interruptions."""

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.contract.rollout_lab import PROMPT, VOCAB, group, one, reference, run, update
from tranship.layouts import box_size, full_box, subtract
from tranship.types import RunError, SampleId, UserError


def test_responses_are_whole_and_typed(make_rollout):
    engine = make_rollout(version=6)
    done = run(engine, group(0), group(1, 3))
    assert set(done) == {SampleId(0, index) for index in range(4)} | {SampleId(1, index) for index in range(3)}
    for response in done.values():
        assert response.token_ids.dtype == np.int32
        assert response.logprobs.dtype == np.float32
        assert response.policy_versions.dtype == np.int32
        assert (response.policy_versions == 6).all()
        ended = response.token_ids[-1] == 1
        assert response.finish_reason == ("stop" if ended else "length")
        assert len(response.token_ids) == 20 or ended
        assert 1 not in response.token_ids[:-1]


def test_logprobs_and_probe_are_the_models(make_rollout, rollout_folders):
    engine = make_rollout()
    for response in run(engine, group(0)).values():
        assert np.abs(response.logprobs - reference(rollout_folders[0], response.token_ids)).max() <= 1e-4
    probed = engine.probe(np.concatenate([PROMPT, PROMPT]))
    assert probed.dtype == np.float32
    assert len(probed) == 2 * len(PROMPT) - 1
    assert np.abs(probed[len(PROMPT) - 1 :] - reference(rollout_folders[0], PROMPT)).max() <= 1e-4


def test_seeds_decide(make_rollout):
    first, second = run(make_rollout(), group(0)), run(make_rollout(), group(0))
    assert len({response.token_ids.tobytes() for response in first.values()}) == 4
    for sample, response in first.items():
        assert np.array_equal(response.token_ids, second[sample].token_ids)


def test_abort_and_partials(make_rollout):
    engine = make_rollout(ignore_eos=True)
    engine.submit(group(0, 4))
    for _ in range(4):
        engine.step()
    stopped = engine.abort([SampleId(0, 0)]) + engine.abort()
    assert engine.num_unfinished == 0
    assert {response.sample for response in stopped} == {SampleId(0, index) for index in range(4)}
    assert {response.finish_reason for response in stopped} == {"abort"}
    partials = {response.sample: response for response in stopped}
    for sample, response in run(engine, group(0, 4, partials)).items():
        kept = len(partials[sample].token_ids)
        assert len(response.token_ids) == 20
        assert np.array_equal(response.token_ids[:kept], partials[sample].token_ids)
        assert np.array_equal(response.logprobs[:kept], partials[sample].logprobs)


def test_peek_shows_what_running_samples_have_and_changes_nothing(make_rollout):
    calm = run(make_rollout(ignore_eos=True), group(0, 3))
    engine = make_rollout(ignore_eos=True)
    starts = dict.fromkeys([SampleId(0, 0), SampleId(0, 2), SampleId(9, 0)], 0)
    engine.submit(group(0, 3))
    assert engine.peek(starts) == [], "samples that wait have nothing yet"
    seen = {SampleId(0, 0): [], SampleId(0, 2): []}
    done = {}
    while engine.num_unfinished:
        done |= {response.sample: response for response in engine.step()}
        for response in engine.peek(starts):
            assert response.finish_reason == "abort"
            assert len(response.token_ids) > 0
            assert response.sample not in done
            seen[response.sample].append(response)
            starts[response.sample] += len(response.token_ids)
        assert engine.peek(starts) == []
    for sample, parts in seen.items():
        assert len(parts) > 10, "it is seen as it grows"
        shown = starts[sample]
        assert np.array_equal(np.concatenate([p.token_ids for p in parts]), calm[sample].token_ids[:shown])
        assert np.array_equal(np.concatenate([p.logprobs for p in parts]), done[sample].logprobs[:shown])
    for sample, response in done.items():
        assert np.array_equal(response.token_ids, calm[sample].token_ids)


def test_pieces_cover_the_model(make_rollout, rollout_folders):
    """Of several ranks together, and each of them has an element at most once."""
    engine = make_rollout(version=-1)
    assert engine.policy_version == -1
    tensors = load_file(rollout_folders[0] / "model.safetensors")
    missing = {name: [full_box(tuple(tensor.shape))] for name, tensor in tensors.items()}
    for pieces in (engine.pieces(), *getattr(engine, "others_pieces", [])):
        here = {name: [full_box(tuple(tensor.shape))] for name, tensor in tensors.items()}
        for piece in pieces:
            extents = [stop - start for start, stop in piece.box]
            assert [stop - start for start, stop in piece.storage_box[-len(piece.box) :]] == extents
            left = [rest for box in here[piece.name] for rest in subtract(box, piece.box)]
            assert sum(map(box_size, here[piece.name])) - sum(map(box_size, left)) == box_size(piece.box)
            here[piece.name] = left
            missing[piece.name] = [rest for box in missing[piece.name] for rest in subtract(box, piece.box)]
    assert not any(missing.values())


def test_sleep_and_wake_up(make_rollout, rollout_folders):
    engine = make_rollout()
    before = run(engine, group(0))
    engine.sleep()
    engine.wake_up()
    engine.submit(group(0))
    with pytest.raises(RunError, match="update"):
        engine.step()
    engine.abort()
    update(engine, rollout_folders[0], 1)
    for sample, response in run(engine, group(0)).items():
        assert np.array_equal(response.token_ids, before[sample].token_ids)
        assert (response.policy_versions == 1).all()


def test_what_does_not_fit_is_refused_one_by_one(make_rollout):
    engine = make_rollout()
    calm = run(make_rollout(), group(0), group(1))
    engine.submit(group(0))
    engine.step()
    for request, message in (
        (group(2, cap=120), "120"),
        (group(2, prompt=np.arange(119, dtype=np.int32)), "120"),
        (group(2, prompt=np.array([VOCAB], np.int32)), str(VOCAB)),
        (group(2, prompt=np.empty(0, np.int32)), "token"),
        (group(2, top_p=0.0), "top_p"),
        (group(2, temperature=-1.0), "temperature"),
        (group(0), "running already"),
    ):
        unfinished = engine.num_unfinished
        with pytest.raises(UserError, match=message):
            engine.submit(request)
        assert engine.num_unfinished == unfinished
    done = run(engine, group(1))
    assert set(done) == set(calm)
    for sample, response in done.items():
        assert np.array_equal(response.token_ids, calm[sample].token_ids)


def test_counts(make_rollout):
    engine = make_rollout(ignore_eos=True)
    assert (engine.num_unfinished, engine.num_free) == (0, 4)
    assert engine.step() == []
    engine.submit(group(0, 3))
    assert (engine.num_unfinished, engine.num_free) == (3, 1)
    assert len(run(engine)) == 3
    assert (engine.num_unfinished, engine.num_free) == (0, 4)


def start(make_rollout, on_update, cap=10):
    """An engine at version 2 with four samples that have begun, and equally far (an engine may decode right after a
    prefill, or at the next step)."""
    engine = make_rollout(version=2, ignore_eos=True, on_update=on_update)
    engine.submit(group(0, cap=cap))
    for _ in range(3):
        assert engine.step() == []
    return engine


def check_versions(response, folders, kept, *, new_cache):
    """kept tokens of version 2 and the rest of 3; the rest has the new weights' log-probs if the cache is new too."""
    old = int((response.policy_versions == 2).sum())
    assert response.policy_versions.tolist() == [2] * old + [3] * (10 - old)
    assert old in kept
    wanted = [reference(folder, response.token_ids) for folder in folders]
    assert np.abs(response.logprobs[:old] - wanted[0][:old]).max() <= 1e-4
    assert (np.abs(response.logprobs[old:] - wanted[1][old:]).max() <= 1e-4) == new_cache


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
def test_pausing_without_an_abort_goes_on_after_an_update(make_rollout, rollout_folders, on_update):
    engine = start(make_rollout, on_update)
    update(engine, rollout_folders[1], 3)
    done = run(engine)
    assert len(done) == 4
    for response in done.values():
        check_versions(response, rollout_folders, (3, 4), new_cache=on_update == "recompute")


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
def test_pausing_with_an_abort_goes_on_from_partial_responses(make_rollout, rollout_folders, on_update):
    engine = start(make_rollout, on_update)
    stopped = {response.sample: response for response in engine.abort()}
    kept = len(stopped[SampleId(0, 0)].token_ids)
    assert kept in (3, 4)
    update(engine, rollout_folders[1], 3)
    done = run(engine, group(0, cap=10, partials=stopped))
    assert len(done) == 4
    for response in done.values():
        check_versions(response, rollout_folders, (kept,), new_cache=True)


def test_pausing_by_waiting_leaves_one_version(make_rollout, rollout_folders):
    engine = start(make_rollout, "recompute")
    for response in run(engine).values():
        assert response.policy_versions.tolist() == [2] * 10
    update(engine, rollout_folders[1], 3)
    for response in run(engine, group(1)).values():
        assert (response.policy_versions == 3).all()
        assert np.abs(response.logprobs - reference(rollout_folders[1], response.token_ids)).max() <= 1e-4


def test_an_updated_engine_is_as_a_fresh_one_and_the_same_weights_change_nothing(make_rollout, rollout_folders):
    engine, fresh = make_rollout(), make_rollout(version=-1)
    run(engine, group(0))
    update(fresh, rollout_folders[1], 5)
    for version in (1, 2):
        update(engine, rollout_folders[1], version)
        assert np.array_equal(engine.probe(PROMPT), fresh.probe(PROMPT))
        wanted = run(fresh, group(0, temperature=0.0))
        for sample, response in run(engine, group(0, temperature=0.0)).items():
            assert np.array_equal(response.token_ids, wanted[sample].token_ids)
            assert np.array_equal(response.logprobs, wanted[sample].logprobs)


def test_deterministic_mode_is_bit_equal_whatever_runs_beside_or_refused(make_rollout):
    try:
        engine = make_rollout(deterministic=True, max_running=13)
    except UserError:
        return
    assert engine.capabilities.deterministic
    alone = {}
    for index in range(4):
        alone |= run(make_rollout(deterministic=True), one(group(0, cap=40), index))
    long, short = np.arange(60, dtype=np.int32), np.arange(2, dtype=np.int32)
    engine.submit(group(5, 3, prompt=long, cap=50, temperature=0.0))
    for _ in range(7):
        engine.step()
    engine.submit(group(6, 1, prompt=short, cap=4, top_p=0.5))
    engine.submit(group(0, cap=40))
    done = {}
    for _ in range(9):
        done |= {response.sample: response for response in engine.step()}
    engine.abort([SampleId(5, 0), SampleId(5, 2)])
    done |= run(engine, group(7, 5, cap=30, temperature=1.9))
    for sample, response in alone.items():
        assert np.array_equal(response.token_ids, done[sample].token_ids)
        assert np.array_equal(response.logprobs, done[sample].logprobs)
