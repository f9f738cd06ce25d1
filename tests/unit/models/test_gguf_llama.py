"""A GGUF file written here comes back as the model that it was made from."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tranship.models.folder import check
from tranship.models.gguf_llama import convert
from tranship.models.tiny import CHAT_TEMPLATE, make_tokenizer
from tranship.types import UserError

gguf = pytest.importorskip("gguf")

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def make_model(tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).float().eval()


def side_by_side(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows in the order of GGUF: within each head, row i next to row i + half."""
    order = []
    head = values.shape[0] // num_heads
    for h in range(num_heads):
        for i in range(head // 2):
            order += [h * head + i, h * head + head // 2 + i]
    return values[order]


def write_gguf(path: Path, model: LlamaForCausalLM, architecture: str = "llama") -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    tokenizer = make_tokenizer(config.vocab_size)
    tokens = tokenizer.convert_ids_to_tokens(list(range(config.vocab_size)))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, tensor in model.state_dict().items():
        stem = name.removesuffix(".weight")
        if stem == "lm_head" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if stem.startswith("model.layers."):
            _, _, layer, part = stem.split(".", 3)
            target = f"blk.{layer}.{LAYER_NAMES[part]}"
            if part.endswith("q_proj"):
                values = side_by_side(values, config.num_attention_heads)
            elif part.endswith("k_proj"):
                values = side_by_side(values, config.num_key_value_heads)
        else:
            target = names[stem]
        writer.add_tensor(f"{target}.weight", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("tied", [True, False])
def test_the_converted_model_computes_the_same_logits(tmp_path: Path, tied: bool):
    model = make_model(tied)
    write_gguf(tmp_path / "m.gguf", model)
    (tmp_path / "out").mkdir()
    convert(tmp_path / "m.gguf", tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.arange(40)[None] * 7 % 300
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again(ids).logits)
    shared = again.lm_head.weight.data_ptr() == again.model.embed_tokens.weight.data_ptr()
    assert shared == tied
    info = check(tmp_path / "out", need_chat_template=True)
    assert (info.tied, info.eos_token_ids, info.pad_token_id, info.context_length) == (tied, (2,), 2, 128)
    assert info.num_parameters == sum(p.numel() for p in model.parameters())


def test_the_converted_tokenizer_encodes_the_same_ids(tmp_path: Path):
    write_gguf(tmp_path / "m.gguf", make_model(True))
    (tmp_path / "out").mkdir()
    convert(tmp_path / "m.gguf", tmp_path / "out")
    again, original = AutoTokenizer.from_pretrained(tmp_path / "out"), make_tokenizer(300)
    for text in ["What is 12 + 345?", "  héllo\n\n½ 日本<|im_end|>x", "don't\tI'LL"]:
        assert again(text)["input_ids"] == original(text)["input_ids"]
        assert again.decode(again(text)["input_ids"]) == text
    assert again.chat_template == CHAT_TEMPLATE


def test_another_architecture_is_refused(tmp_path: Path):
    write_gguf(tmp_path / "m.gguf", make_model(True), architecture="bert")
    with pytest.raises(UserError, match="bert"):
        convert(tmp_path / "m.gguf", tmp_path)
