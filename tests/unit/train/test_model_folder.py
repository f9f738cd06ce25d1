import json

import pytest
import torch
from safetensors import safe_open
from transformers import AttentionInterface, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from tranship.algorithms.objective import make_loss
from tranship.config.schema import AlgorithmConfig
from tranship.train import model_folder
from tranship.train.model_folder import load_model
from tranship.types import UserError

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["llama-tied", "llama", "qwen2", "qwen3"])
def test_an_exported_folder_reloads_with_the_same_logits(make_engine, batch, tmp_path, family):
    engine = make_engine(family)
    engine.update(batch, make_loss(AlgorithmConfig()))
    engine.export(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    for piece in engine.pieces():
        assert torch.equal(model.get_parameter(piece.name), engine.storage(piece.storage)), piece.name
    tied = family in ("llama-tied", "qwen3")
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) != tied  # noqa: SIM118
    tokens = torch.arange(10)[None]
    engine._model.set_attn_implementation("sdpa")
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, engine._model(tokens).logits, rtol=0, atol=1e-6)


def test_an_exported_folder_has_the_tokenizer_and_no_trace_of_the_engine(make_engine, tmp_path):
    make_engine().export(tmp_path)
    assert (tmp_path / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (tmp_path / "tokenizer.json").is_file()
    assert "tranship" not in (tmp_path / "config.json").read_text()


def test_generation_settings_travel_even_if_they_are_odd(model_folders, make_engine, tmp_path):
    settings = model_folders["llama"] / "generation_config.json"
    before = settings.read_text()
    settings.write_text(json.dumps({"do_sample": False, "temperature": 0.3, "eos_token_id": [2, 5]}))
    try:
        make_engine("llama").export(tmp_path)
        assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == [2, 5]
    finally:
        settings.write_text(before)


def test_a_folder_that_is_no_model_is_a_one_line_error(tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        load_model(tmp_path, CPU, trust_remote_code=False)
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(UserError, match="does not load") as error:
        load_model(tmp_path, CPU, trust_remote_code=False)
    assert "\n" not in str(error.value)


def test_another_family_runs_packed_too(tmp_path):
    GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=32)).save_pretrained(tmp_path)
    load_model(tmp_path, CPU, trust_remote_code=False)


def test_a_model_that_would_see_neighbours_is_refused(model_folders, monkeypatch):
    def plain_causal(module, query, key, value, attention_mask, *, packed_index, scaling=None, **options):
        attended = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return attended.transpose(1, 2), None

    AttentionInterface.register("leaky", plain_causal)
    monkeypatch.setattr(model_folder, "ATTENTION", "leaky")
    with pytest.raises(UserError, match="packed log-probs differ"):
        load_model(model_folders["llama"], CPU, trust_remote_code=False)
