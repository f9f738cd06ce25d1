"""The fetched SmolLM2-135M-Instruct is the model that it should be (skipped where it was not fetched)."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tranship.data.chat import encode_chat
from tranship.models.cache import model_folder
from tranship.models.folder import check
from tranship.models.tokenizer import decode_response, load_tokenizer, template_system_prompt

FOLDER = model_folder("smollm2-135m")
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="run: tranship model get smollm2-135m")


def test_it_is_whole():
    info = check(FOLDER, need_chat_template=True)
    assert info.num_parameters == 134_515_008
    assert (info.vocab_size, info.context_length, info.tied) == (49152, 8192, True)
    assert (info.eos_token_ids, info.pad_token_id) == ((2,), 2)


def test_its_tokenizer_cuts_digits_apart_and_adds_its_system_prompt():
    tokenizer = load_tokenizer(FOLDER)
    assert template_system_prompt(tokenizer) == "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    ids = encode_chat(tokenizer, [{"role": "user", "content": "What is 12 + 345?"}])
    assert ids[-4:].tolist() == [1, 520, 9531, 198]
    tokens = tokenizer.convert_ids_to_tokens(ids.tolist())
    assert [token for token in tokens if token.isdigit()] == ["1", "2", "3", "4", "5"]
    assert tokens.count("<|im_start|>") == 3


@pytest.mark.slow
def test_it_answers():
    tokenizer = load_tokenizer(FOLDER)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    for question, answer in [("What is 2 + 2?", "4"), ("What is the capital of France?", "Paris")]:
        ids = torch.from_numpy(encode_chat(tokenizer, [{"role": "user", "content": question}])).long()[None]
        generated = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)[0]
        response = generated[ids.shape[1] :]
        assert answer in decode_response(tokenizer, response.numpy())
        assert response[-1] == 2
