"""What every rollout engine of the table keeps to."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tranship.layouts.pieces import box_size
from tranship.lookup import resolve
from tranship.rollout import ROLLOUT_ENGINES, GroupRequest
from tranship.types import SampleId, Sampling, UserError, sample_seed

VOCAB = 320
PROMPT = np.arange(3, 40, dtype=np.int32)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two models of one shape."""
    made = []
    for seed in range(2):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(
            "llama",
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=True,
        )
        model = AutoModelForCausalLM.from_config(config).float()
        with torch.no_grad():
            for parameter in model.parameters():
                _ = parameter.normal_(0, 0.2) if parameter.ndim > 1 else parameter
        made.append(tmp_path_factory.mktemp("model"))
        model.save_pretrained(made[-1])
    return made


@pytest.fixture(params=sorted(ROLLOUT_ENGINES))
def make(request, folders):
    cls = resolve(request.param, ROLLOUT_ENGINES, "rollout.engine")

    def build(version=0, **settings):
        defaults = {
            "dtype": "fp32",
            "device": "cpu",
            "max_running": 4,
            "max_tokens": 120,
            "on_update": "recompute",
            "deterministic": False,
            "eos_token_ids": (1,),
        }
        engine = cls(folders[0], **(defaults | settings))
        if version >= 0:
            update(engine, folders[0], version)
        return engine

    return build


@torch.no_grad()
def update(engine, folder, version):
    tensors = load_file(folder / "model.safetensors")
    engine.begin_update()
    for piece in engine.pieces():
        target = engine.storage(piece.storage)[tuple(slice(*bounds) for bounds in piece.storage_box)]
        target.copy_(tensors[piece.name][tuple(slice(*bounds) for bounds in piece.box)])
    engine.finish_update(version)


def group(group_id=0, count=4, partials=None, cap=20, **sampling):
    samples = tuple(SampleId(group_id, index) for index in range(count))
    seeds = tuple(sample_seed(0, sample) for sample in samples)
    return GroupRequest(PROMPT, samples, seeds, Sampling(cap, **sampling), partials)


def run(engine, *requests):
    for request in requests:
        engine.submit(request)
    done = {}
    for _ in range(1000):
        if not engine.num_unfinished:
            return done
        done |= {response.sample: response for response in engine.step()}
    raise AssertionError("the engine does not finish")


def reference(folder, response):
    ids = torch.from_numpy(np.concatenate([PROMPT, response]).astype(np.int64))
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids[None]).logits[0]
    picked = torch.log_softmax(logits, -1)[len(PROMPT) - 1 : -1].gather(1, ids[len(PROMPT) :, None])
    return picked.squeeze(1).numpy()


def test_responses_are_whole_and_typed(make):
    engine = make(version=6)
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


def test_logprobs_and_probe_are_the_models(make, folders):
    engine = make()
    for response in run(engine, group(0)).values():
        assert np.abs(response.logprobs - reference(folders[0], response.token_ids)).max() <= 1e-4
    probed = engine.probe(np.concatenate([PROMPT, PROMPT]))
    assert probed.dtype == np.float32
    assert len(probed) == 2 * len(PROMPT) - 1
    assert np.abs(probed[len(PROMPT) - 1 :] - reference(folders[0], PROMPT)).max() <= 1e-4


def test_seeds_decide(make):
    first, second = run(make(), group(0)), run(make(), group(0))
    assert len({response.token_ids.tobytes() for response in first.values()}) == 4
    for sample, response in first.items():
        assert np.array_equal(response.token_ids, second[sample].token_ids)


def test_an_update_reaches_running_samples(make, folders):
    engine = make(version=2, ignore_eos=True)
    if not engine.capabilities.partial_rollout:
        pytest.skip("this engine finishes what it began before it takes new weights")
    engine.submit(group(0, cap=8))
    for _ in range(3):
        assert engine.step() == []
    update(engine, folders[1], 3)
    assert engine.policy_version == 3
    for response in run(engine).values():
        old = int((response.policy_versions == 2).sum())
        assert 0 < old < 8
        assert response.policy_versions.tolist() == [2] * old + [3] * (8 - old)
        wanted = [reference(folder, response.token_ids) for folder in folders]
        assert np.abs(response.logprobs - np.concatenate([wanted[0][:old], wanted[1][old:]])).max() <= 1e-4


def test_abort_and_partials(make):
    engine = make(ignore_eos=True)
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


def test_pieces_cover_the_model_once(make, folders):
    engine = make(version=-1)
    assert engine.policy_version == -1
    sizes = {}
    for piece in engine.pieces():
        assert tuple(b - a for a, b in piece.box) == tuple(b - a for a, b in piece.storage_box[-len(piece.box) :])
        sizes[piece.name] = sizes.get(piece.name, 0) + box_size(piece.box)
    assert sizes == {name: tensor.numel() for name, tensor in load_file(folders[0] / "model.safetensors").items()}


def test_sleep_and_wake_up(make, folders):
    engine = make()
    before = run(engine, group(0))
    engine.sleep()
    engine.wake_up()
    update(engine, folders[0], 1)
    for sample, response in run(engine, group(0)).items():
        assert np.array_equal(response.token_ids, before[sample].token_ids)


def test_too_long_a_request_is_refused(make):
    engine = make()
    with pytest.raises(UserError, match="120"):
        engine.submit(group(0, cap=120))
    assert engine.num_unfinished == 0


def test_counts(make):
    engine = make(ignore_eos=True)
    assert (engine.num_unfinished, engine.num_free) == (0, 4)
    assert engine.step() == []
    engine.submit(group(0, 3))
    assert (engine.num_unfinished, engine.num_free) == (3, 1)
    assert len(run(engine)) == 3
    assert (engine.num_unfinished, engine.num_free) == (0, 4)


def test_deterministic_mode_is_bit_equal_or_refused(make):
    try:
        engine = make(deterministic=True)
    except UserError:
        return
    assert engine.capabilities.deterministic
    together, alone = run(engine, group(0), group(1)), {}
    for index in range(4):
        name = SampleId(0, index)
        request = GroupRequest(PROMPT, (name,), (sample_seed(0, name),), Sampling(20))
        alone |= run(make(deterministic=True), request)
    for sample, response in alone.items():
        assert np.array_equal(response.token_ids, together[sample].token_ids)
        assert np.array_equal(response.logprobs, together[sample].logprobs)
