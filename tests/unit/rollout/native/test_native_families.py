"""Mixtures of experts and latent attention: their settings, their updates, and what is refused."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from tranship.layouts import Layout
from tranship.reshard import WeightSource, make_plan
from tranship.rollout.native import batch, load_folder
from tranship.rollout.native.mlp import Router
from tranship.rollout.native.shape import ExpertShape, read_shape
from tranship.train.pieces import model_pieces, routing_buffers
from tranship.types import SampleId, UserError

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3")
NEW_FAMILIES = FAMILIES[3:]
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
VARIANTS = [
    ("qwen3_moe", {"norm_topk_prob": False}),
    ("qwen3_moe", {"mlp_only_layers": [1], "attention_bias": True}),
    ("qwen3_moe", {"decoder_sparse_step": 2, "num_experts_per_tok": 1}),
    ("qwen3_moe", {"rope_parameters": YARN}),
    ("deepseek_v2", {"topk_method": "greedy", "n_group": None, "topk_group": None}),
    ("deepseek_v2", {"q_lora_rank": 32, "attention_bias": True, "mlp_bias": True}),
    ("deepseek_v2", {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}}),
    ("deepseek_v2", {"first_k_dense_replace": 3}),
    ("deepseek_v3", {"rope_interleave": False}),
    ("deepseek_v3", {"q_lora_rank": None, "attention_bias": True}),
    ("deepseek_v3", {"norm_topk_prob": False, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}),
    ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "n_shared_experts": 2}),
]


@pytest.mark.parametrize(("family", "config"), VARIANTS, ids=lambda value: str(value)[:60])
def test_settings_of_a_family_equal_a_plain_forward(lab, family, config):
    folder, sequence = lab.folder(family, **config), lab.prompt(1, 90)
    wanted = lab.reference(folder, sequence[:1], sequence[1:])
    engine = lab.engine(folder)
    assert np.abs(engine.probe(sequence) - wanted).max() <= 1e-4
    for response in lab.run(engine, lab.group(0, sequence, 2, max_response_tokens=6)).values():
        assert np.abs(lab.reference(folder, sequence, response.token_ids) - response.logprobs).max() <= 1e-4


@pytest.mark.parametrize(("family", "most"), [(f, 2048) for f in NEW_FAMILIES] + [(f, 8) for f in FAMILIES])
def test_shared_prompts_interruptions_and_mixed_batches_equal_a_plain_forward(
    lab, prefilled, monkeypatch, family, most
):
    """most: tokens of a prefill; a longer prompt, and a longer partial response, run in parts."""
    monkeypatch.setattr(batch, "PREFILL_TOKENS", most)
    folder = lab.folder(family, tied=False)
    prompts = {group: lab.prompt(group, length) for group, length in enumerate((40, 3, 77))}
    engine = lab.engine(folder, max_running=7)
    sizes = prefilled(engine)
    for group, prompt in prompts.items():
        engine.submit(lab.group(group, prompt, 4, max_response_tokens=40))
    for _ in range(15):
        engine.step()
    stopped = {response.sample: response for response in engine.abort([SampleId(0, 1), SampleId(0, 2)])}
    assert {len(response.token_ids) for response in stopped.values()} == {16}
    request = lab.group(0, prompts[0], 2, partials=stopped, first=1, max_response_tokens=40)
    done = lab.run(engine, request)
    assert len(done) == 12
    assert max(sizes) == min(77, most)
    for sample, response in done.items():
        wanted = lab.reference(folder, prompts[sample.group_id], response.token_ids)
        assert np.abs(wanted - response.logprobs).max() <= 1e-4


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_after_an_update_an_engine_is_as_a_fresh_one_and_the_same_weights_change_nothing(lab, family, tied):
    old, new = lab.folder(family, tied), lab.folder(family, tied, weights_seed=1)
    sequence = lab.prompt(5, 50)
    engine, fresh = lab.engine(old), lab.engine(new)
    greedy = lab.group(0, sequence, 2, temperature=0.0)
    before = engine.probe(sequence)
    lab.run(engine, greedy)
    load_folder(engine, new, 1)
    assert np.abs(engine.probe(sequence) - before).max() > 1e-2
    for version in (2, 3):
        assert np.array_equal(engine.probe(sequence), fresh.probe(sequence))
        wanted = lab.run(fresh, greedy)
        for sample, response in lab.run(engine, greedy).items():
            assert np.array_equal(response.token_ids, wanted[sample].token_ids)
            assert np.array_equal(response.logprobs, wanted[sample].logprobs)
        load_folder(engine, new, version)


@pytest.mark.parametrize(
    ("family", "config"), [*((family, {}) for family in NEW_FAMILIES), ("llama", {"num_key_value_heads": 1})]
)
def test_deterministic_to_the_bit_whatever_runs_beside(lab, family, config):
    folder, prompt = lab.folder(family, **config), lab.prompt(3, 30)
    alone = {}
    for index in range(2):
        engine = lab.engine(folder, deterministic=True, max_running=1)
        alone |= lab.run(engine, lab.group(0, prompt, 1, first=index, max_response_tokens=50))
    for slots in (2, 9):
        engine = lab.engine(folder, deterministic=True, max_running=slots)
        engine.submit(lab.group(7, lab.prompt(7, 100), 3, max_response_tokens=20))
        engine.submit(lab.group(0, prompt, 2, max_response_tokens=50))
        done = lab.run(engine, lab.group(8, lab.prompt(8, 2), 5, temperature=0.3))
        for sample, response in alone.items():
            assert np.array_equal(response.token_ids, done[sample].token_ids)
            assert np.array_equal(response.logprobs, done[sample].logprobs)


@pytest.mark.parametrize("family", NEW_FAMILIES)
def test_bf16_stays_near_a_plain_forward(lab, family):
    folder, prompt = lab.folder(family), lab.prompt(7)
    engine = lab.engine(folder, dtype="bf16")
    dtypes = {piece.name.rsplit(".", 2)[-2]: piece.dtype for piece in engine.pieces()}
    assert dtypes["gate"] == ("bfloat16" if family == "qwen3_moe" else "float32")
    done = lab.run(engine, lab.group(0, prompt))
    wanted = np.concatenate([lab.reference(folder, prompt, r.token_ids) for r in done.values()])
    ours = np.concatenate([r.logprobs for r in done.values()])
    assert np.abs(wanted - ours).mean() < 0.1


def test_a_latent_cache_keeps_one_vector_of_a_token(lab):
    shape = read_shape(lab.folder("deepseek_v3"), 100)
    assert (shape.kv_sides, shape.num_kv_heads, shape.head_dim) == (1, 1, 24 + 8)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.booleans(), st.booleans())
def test_the_router_chooses_as_a_plain_loop(seed, top_groups, per_group, top_k, sigmoid, normalised):
    generator = torch.Generator().manual_seed(seed)
    num_groups, per_group = 4, per_group + 1
    count = num_groups * per_group
    top_k = min(top_k, top_groups * per_group)
    weight, x = torch.randn(count, 6, generator=generator), torch.randn(9, 6, generator=generator)
    bias = torch.randn(count, generator=generator) * 0.3 if sigmoid else None
    kind = ExpertShape(
        num_experts=count,
        top_k=top_k,
        mlp=1,
        shared_mlp=0,
        scores="sigmoid" if sigmoid else "softmax",
        normalised=normalised,
        scale=2.5,
        num_groups=num_groups,
        top_groups=top_groups,
        best_of=2 if sigmoid else 1,
        corrected=sigmoid,
        fp32_router=True,
    )
    chosen, share = Router(kind, weight, bias)(x)
    for row in range(9):
        logits = (x[row].double() @ weight.double().T).numpy()
        scores = 1 / (1 + np.exp(-logits)) if sigmoid else np.exp(logits) / np.exp(logits).sum()
        choice = scores + bias.double().numpy() if bias is not None else scores
        groups = np.sort(choice.reshape(num_groups, per_group))[:, -kind.best_of :].sum(1)
        best = set(np.argsort(-groups)[:top_groups].tolist())
        allowed = [expert for expert in range(count) if expert // per_group in best]
        wanted = sorted(allowed, key=lambda expert: -choice[expert])[:top_k]
        assert chosen[row].tolist() == wanted
        shares = scores[wanted] / scores[wanted].sum() if normalised else scores[wanted]
        assert np.abs(share[row].numpy() - 2.5 * shares).max() < 1e-5


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=true"),
        ("deepseek_v2", {"n_group": 3}, "3 of 8 experts within 2 of 3 groups: groups must be equal"),
        ("deepseek_v3", {"n_group": 8}, "of 2 or more experts"),
        ("deepseek_v3", {"topk_group": 1}, "there are not so many"),
        ("deepseek_v3", {"topk_group": 5}, "there are not so many"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "9 of 8 experts"),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 64}, "window of 64"),
    ],
)
def test_what_cannot_run_is_refused(lab, tmp_path, family, change, message):
    config = json.loads((lab.folder(family) / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        lab.engine(tmp_path, load=False)


def trainer_pieces(model):
    """The pieces of a transformers model in memory, as the training engine gives them, and their storages."""
    storages = {**dict(model.named_parameters()), **routing_buffers(model)}
    return model_pieces(storages), storages


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", NEW_FAMILIES)
def test_weights_of_a_model_in_memory_arrive_through_a_plan(lab, family, dtype):
    new = lab.folder(family, tied=False, weights_seed=1)
    model = AutoModelForCausalLM.from_pretrained(new, dtype=torch.float32)
    pieces, storages = trainer_pieces(model)
    engine, wanted = lab.engine(lab.folder(family, tied=False), dtype=dtype), lab.engine(new, dtype=dtype)
    plan = make_plan(Layout((tuple(pieces),)), Layout((tuple(engine.pieces()),)), bucket_bytes=1 << 16)
    engine.begin_update()
    WeightSource(plan, lambda name: storages[name].detach()).push(1, engine.storage)
    engine.finish_update(1)
    sequence = lab.prompt(4, 60)
    assert np.array_equal(engine.probe(sequence), wanted.probe(sequence))
