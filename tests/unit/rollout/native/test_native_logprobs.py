"""The engine's log-probs are those of transformers' forward pass, in every family and setting."""

import json
import shutil

import numpy as np
import pytest

from tranship.types import SampleId, UserError

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3")


def gap(lab, folder, done, prompts, temperature=1.0):
    worst = 0.0
    for sample, response in done.items():
        wanted = lab.reference(folder, prompts[sample.group_id], response.token_ids, temperature)
        worst = max(worst, float(np.abs(wanted - response.logprobs).max()))
    return worst


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_and_probed_logprobs_equal_a_plain_forward(lab, family, tied, deterministic):
    folder = lab.folder(family, tied)
    engine = lab.engine(folder, deterministic=deterministic)
    prompts = {group: lab.prompt(group) for group in range(3)}
    done = lab.run(engine, *(lab.group(group, prompt) for group, prompt in prompts.items()))
    assert len(done) == 12
    assert gap(lab, folder, done, prompts) <= 1e-4
    sequence = lab.prompt(9, 60)
    assert np.abs(engine.probe(sequence) - lab.reference(folder, sequence[:1], sequence[1:])).max() <= 1e-4


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
        {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rotary_scalings_equal_a_plain_forward(lab, rope):
    folder = lab.folder(rope_parameters=rope)
    sequence = lab.prompt(1, 200)
    wanted = lab.reference(folder, sequence[:1], sequence[1:])
    assert np.abs(lab.engine(folder).probe(sequence) - wanted).max() <= 1e-4
    plain = lab.engine(folder, load=False)
    assert plain.policy_version == -1


def test_biases_everywhere_equal_a_plain_forward(lab):
    folder = lab.folder(attention_bias=True, mlp_bias=True)
    sequence = lab.prompt(1, 80)
    wanted = lab.reference(folder, sequence[:1], sequence[1:])
    assert np.abs(lab.engine(folder).probe(sequence) - wanted).max() <= 1e-4


def test_a_head_for_each_query_and_a_ragged_vocabulary(lab):
    folder = lab.folder(num_key_value_heads=6, vocab_size=777)
    prompts = {0: lab.prompt(3, 20)}
    done = lab.run(lab.engine(folder), lab.group(0, prompts[0], max_response_tokens=80))
    assert gap(lab, folder, done, prompts) <= 1e-4


@pytest.mark.parametrize("temperature", [0.7, 1.6])
def test_temperature_is_in_the_logprobs(lab, temperature):
    folder, prompts = lab.folder(), {0: lab.prompt(5)}
    done = lab.run(lab.engine(folder), lab.group(0, prompts[0], temperature=temperature))
    assert gap(lab, folder, done, prompts, temperature) <= 1e-4
    probed = lab.engine(folder).probe(prompts[0], temperature)
    assert np.abs(probed - lab.reference(folder, prompts[0][:1], prompts[0][1:], temperature)).max() <= 1e-4


def test_greedy_reports_temperature_one_and_takes_the_likeliest(lab):
    folder, prompts = lab.folder(), {0: lab.prompt(5)}
    done = lab.run(lab.engine(folder), lab.group(0, prompts[0], count=2, temperature=0.0))
    assert gap(lab, folder, done, prompts) <= 1e-4
    first, second = (done[SampleId(0, index)].token_ids for index in range(2))
    assert np.array_equal(first, second)
    engine = lab.engine(folder)
    assert np.array_equal(engine.probe(prompts[0], 0.0), engine.probe(prompts[0]))


def test_cuts_do_not_change_the_reported_logprobs(lab):
    folder, prompts = lab.folder(), {0: lab.prompt(6)}
    cuts = {"top_k": 20, "top_p": 0.9, "min_p": 0.02}
    done = lab.run(lab.engine(folder), lab.group(0, prompts[0], **cuts))
    assert gap(lab, folder, done, prompts) <= 1e-4


def test_bf16_stays_near_a_plain_forward(lab):
    folder, prompts = lab.folder(), {0: lab.prompt(7)}
    done = lab.run(lab.engine(folder, dtype="bf16"), lab.group(0, prompts[0]))
    wanted = np.concatenate([lab.reference(folder, prompts[0], r.token_ids) for r in done.values()])
    ours = np.concatenate([r.logprobs for r in done.values()])
    assert np.abs(wanted - ours).mean() < 0.05


def test_responses_far_longer_than_the_first_cache(lab):
    folder, prompts = lab.folder(), {0: lab.prompt(8, 100), 1: lab.prompt(9, 5)}
    requests = [lab.group(0, prompts[0], 2, max_response_tokens=200), lab.group(1, prompts[1], 2)]
    assert gap(lab, folder, lab.run(lab.engine(folder), *requests), prompts) <= 1e-4


def test_an_older_config_with_rope_theta_alone(lab, tmp_path):
    folder = tmp_path / "old"
    shutil.copytree(lab.folder(), folder)
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    config["rope_theta"] = 500.0
    (folder / "config.json").write_text(json.dumps(config))
    sequence = lab.prompt(1, 80)
    ours = lab.engine(folder).probe(sequence)
    assert np.abs(ours - lab.reference(folder, sequence[:1], sequence[1:])).max() <= 1e-4
    assert np.abs(ours - lab.engine().probe(sequence)).max() > 1e-2


def refused(lab, message, folder=None, **settings):
    with pytest.raises(UserError, match=message):
        lab.engine(folder, load=False, **settings)


def test_unsupported_models_are_refused_by_name(lab, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    refused(lab, "gpt2.*llama, qwen2, qwen3", tmp_path)
    (tmp_path / "config.json").write_text("{")
    refused(lab, "cannot be read", tmp_path)
    refused(lab, "no config", tmp_path / "nowhere")
    refused(lab, "context of 512", max_tokens=513)
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    refused(lab, "dynamic", lab.folder(rope_parameters=rope))
    window = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}
    refused(lab, "window of 32", lab.folder("qwen2", **window))
