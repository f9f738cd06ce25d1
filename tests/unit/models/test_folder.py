"""What is wrong with a model folder is said before anything is loaded."""

import json
import shutil
import socket
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tranship.models.folder import check, locate
from tranship.models.tiny import make_tiny
from tranship.models.tokenizer import decode_response, load_tokenizer
from tranship.types import UserError


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "m", vocab_size=300, hidden=32, layers=2)


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


def edit(file: Path, **changes: object) -> None:
    settings = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))


def test_a_good_folder(folder: Path):
    info = check(folder, need_chat_template=True)
    weights = load_file(folder / "model.safetensors")
    assert info.architecture == "LlamaForCausalLM"
    assert (info.vocab_size, info.context_length, info.tied) == (300, 2048, True)
    assert (info.eos_token_ids, info.pad_token_id) == ((2,), 2)
    assert info.num_parameters == sum(values.size for values in weights.values())


def test_the_end_of_text_ids_of_all_three_places_count(folder: Path):
    edit(folder / "config.json", eos_token_id=7)
    edit(folder / "generation_config.json", eos_token_id=[9, 7])
    assert check(folder, need_chat_template=False).eos_token_ids == (2, 7, 9)


def test_no_end_of_text_id_at_all(tmp_path: Path):
    folder = make_tiny(tmp_path, "qwen3", vocab_size=300, hidden=32, layers=1)
    edit(folder / "config.json", eos_token_id=None)
    (folder / "generation_config.json").unlink()
    edit(folder / "tokenizer_config.json", eos_token=None)
    with pytest.raises(UserError, match="eos_token_id"):
        check(folder, need_chat_template=False)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["config.json"], "no config.json"),
        (["model.safetensors"], "no weights"),
        (["tokenizer.json", "tokenizer_config.json"], "no tokenizer"),
        (["chat_template.jinja"], "no chat template"),
    ],
)
def test_a_missing_file_is_named(folder: Path, names: list[str], message: str):
    for name in names:
        (folder / name).unlink()
    with pytest.raises(UserError, match=message) as caught:
        check(folder, need_chat_template=True)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_plain_prompts_need_no_chat_template(folder: Path):
    (folder / "chat_template.jinja").unlink()
    assert check(folder, need_chat_template=False).vocab_size == 300


def test_broken_files_are_named(folder: Path):
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for content in (b"version https://git-lfs.github.com/spec/v1\n", whole[: len(whole) // 2]):
        weights.write_bytes(content)
        with pytest.raises(UserError, match="whole safetensors file"):
            check(folder, need_chat_template=True)
    weights.write_bytes(whole)
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json is not usable"):
        check(folder, need_chat_template=True)


def test_weights_in_several_files(folder: Path):
    weights = load_file(folder / "model.safetensors")
    expected = check(folder, need_chat_template=True).num_parameters
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in parts.items():
        save_file({name: weights[name] for name in members}, folder / file)
    weight_map = {name: file for file, members in parts.items() for name in members}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert check(folder, need_chat_template=True).num_parameters == expected
    (folder / "b.safetensors").unlink()
    with pytest.raises(UserError, match=r"1 of 2 weight files .* b\.safetensors"):
        check(folder, need_chat_template=True)


def test_a_tokenizer_of_another_model_is_refused(folder: Path):
    edit(folder / "config.json", vocab_size=250)
    with pytest.raises(UserError, match="300 tokens, the model only 250"):
        check(folder, need_chat_template=True)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("tied", [True, False])
def test_tiny_models_of_every_family(tmp_path: Path, family: str, tied: bool):
    info = check(make_tiny(tmp_path, family, vocab_size=300, hidden=64, layers=1, tied=tied), need_chat_template=True)
    assert info.tied == tied
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) == (not tied)


def test_tiny_models_depend_on_their_seed_alone(tmp_path: Path):
    folders = [
        make_tiny(tmp_path / name, vocab_size=300, hidden=32, layers=1, seed=s) for name, s in ("a0", "b0", "c1")
    ]
    a, b, c = (load_file(folder / "model.safetensors") for folder in folders)
    assert all(np.array_equal(a[name], b[name]) for name in a)
    assert not np.array_equal(a["model.embed_tokens.weight"], c["model.embed_tokens.weight"])


@pytest.mark.parametrize("arguments", [{"family": "gpt9"}, {"hidden": 100}, {"vocab_size": 100}])
def test_tiny_refuses_what_it_cannot_make(tmp_path: Path, arguments: dict):
    with pytest.raises(UserError, match="make_tiny"):
        make_tiny(tmp_path, **arguments)


def test_locate_takes_a_folder_and_a_fetched_name(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRANSHIP_CACHE", str(tmp_path))
    assert locate(str(folder)) == folder
    with pytest.raises(UserError, match="run: tranship model get tiny-random"):
        locate("tiny-random")
    (tmp_path / "models" / "tiny-random").mkdir(parents=True)
    assert locate("tiny-random") == tmp_path / "models" / "tiny-random"


@pytest.mark.parametrize("name", ["./nope", "/nope/x", "a/b/c", "nope with space"])
def test_locate_names_a_missing_folder(name: str):
    with pytest.raises(UserError, match="there is no folder"):
        locate(name)


def test_locate_gives_up_within_seconds_on_a_hub_that_is_silent_or_not_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NO_PROXY", "*")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        for port in (9, silent.getsockname()[1]):
            monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", f"http://127.0.0.1:{port}")
            started = time.monotonic()
            with pytest.raises(UserError, match="did you mean smollm2-135m"):
                locate("smollm2-135")
            assert time.monotonic() - started < 10


def test_locate_uses_a_copy_of_the_hub_where_there_is_no_network(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    repository = tmp_path / "hub" / "models--some--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    shutil.copytree(folder, repository / "snapshots" / "abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", "http://127.0.0.1:9")
    assert locate("some/model") == repository / "snapshots" / "abc"


def test_responses_lose_special_tokens_and_keep_spaces(folder: Path):
    tokenizer = load_tokenizer(folder)
    ids = [*tokenizer(" The answer , is  4 .")["input_ids"], 2]
    assert decode_response(tokenizer, np.array(ids, np.int32)) == " The answer , is  4 ."
    assert decode_response(tokenizer, np.array([], np.int32)) == ""
