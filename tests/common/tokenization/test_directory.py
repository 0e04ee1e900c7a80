from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from common.errors import ConfigurationError
from common.models import ModelFiles, ModelKind
from common.settings import ModelSettings
from common.tokenization import TextModel, load_served_model, load_text_model
from tests.common.tokenization.transformers_oracle import load_directory
from tests.texts import TEXTS

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = {"model_type": "llama", "max_position_embeddings": 2048, "vocab_size": 49160}


@pytest.fixture
def directory(tmp_path: Path, bundled: TextModel) -> Path:
    """Save the bundled vocabulary in the layout of transformers."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bundled.tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    tokenizer.chat_template = "from the file"
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def load(path: Path, *, placeholder: bool = False) -> TextModel:
    return load_text_model(ModelFiles(path.name, ModelKind.DIRECTORY, path), placeholder=placeholder)


def edit(path: Path, **entries: Any) -> None:
    value = json.loads(path.read_text()) | entries
    path.write_text(json.dumps({key: entry for key, entry in value.items() if entry is not None}))


def test_encoding_equals_transformers(directory: Path) -> None:
    model, oracle = load(directory), load_directory(str(directory))
    for text in TEXTS:
        assert model.tokenizer.encode(text).ids == oracle(text)["input_ids"], repr(text)


@pytest.mark.parametrize("bos", [False, True])
def test_framing_follows_tokenizer_json_whatever_the_config_says(directory: Path, bos: bool) -> None:
    framing = TemplateProcessing(single=["<|im_start|>", "$A"] if bos else ["$A"], special_tokens=[("<|im_start|>", 1)])
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.post_processor = framing
    tokenizer.save(str(directory / "tokenizer.json"))
    edit(directory / "tokenizer_config.json", add_bos_token=not bos)
    model, oracle = load(directory), load_directory(str(directory))
    for text in ("", "a b", "<|im_start|>"):
        ids = model.tokenizer.encode(text).ids
        assert ids == oracle(text)["input_ids"]
        bare = model.tokenizer.encode(text, add_special_tokens=False).ids
        assert bare == oracle(text, add_special_tokens=False)["input_ids"]
        assert len(ids) - len(bare) == bos


def test_tokens_that_only_the_tokenizer_config_names_are_added(directory: Path) -> None:
    extra = {"content": "<tool>", "special": False, "normalized": False}
    edit(directory / "tokenizer_config.json", added_tokens_decoder={"49152": extra}, pad_token="<pad>")
    model, oracle = load(directory), load_directory(str(directory))
    text = "a<tool>b<pad>c"
    assert model.tokenizer.encode(text).ids == oracle(text)["input_ids"]
    assert model.tokenizer.token_to_id("<tool>") == 49152
    assert model.tokenizer.decode([49152, 49153], skip_special_tokens=True) == "<tool>"


def test_special_tokens_may_be_objects(directory: Path) -> None:
    edit(directory / "tokenizer_config.json", eos_token={"content": "<|im_end|>", "lstrip": False})
    assert load(directory).special_tokens["eos_token"] == "<|im_end|>"


def test_truncation_and_padding_in_the_file_are_ignored(directory: Path) -> None:
    edit(
        directory / "tokenizer.json",
        truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
    )
    assert len(load(directory).tokenizer.encode("one two three four").ids) == 4


def test_limits_come_from_config(directory: Path) -> None:
    model = load(directory)
    assert (model.max_context_tokens, model.vocabulary_size) == (2048, 49160)


def test_limits_of_a_nested_text_model_are_found(directory: Path) -> None:
    nested = {"text_config": {"max_position_embeddings": 77, "vocab_size": 50_000}}
    (directory / "config.json").write_text(json.dumps(nested))
    model = load(directory)
    assert (model.max_context_tokens, model.vocabulary_size) == (77, 50_000)


def test_a_config_may_omit_the_default_context_of_its_family(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": {"hidden_size": 2560}}))
    assert load(directory).max_context_tokens == 131_072


def test_the_template_file_wins_over_the_config(directory: Path) -> None:
    edit(directory / "tokenizer_config.json", chat_template="from the config")
    assert load(directory).chat_templates == {"default": "from the file"}
    (directory / "chat_template.jinja").unlink()
    assert load(directory).chat_templates == {"default": "from the config"}


def test_named_templates_are_kept_apart(directory: Path) -> None:
    (directory / "chat_template.jinja").unlink()
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    edit(directory / "tokenizer_config.json", chat_template=named)
    assert load(directory).chat_templates == {"default": "plain", "tool_use": "with tools"}
    folder = directory / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text("newer")
    assert load(directory).chat_templates["tool_use"] == "newer"


def test_a_directory_without_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "tokenizer_config.json"])
def test_a_damaged_file_is_named(directory: Path, name: str) -> None:
    (directory / name).write_text("{")
    with pytest.raises(ConfigurationError, match=name):
        load(directory)


def test_a_placeholder_encodes_bytes_and_shows_every_id(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 64, "vocab_size": 1000}))
    model = load(tmp_path, placeholder=True)
    ids = model.tokenizer.encode("a é").ids
    assert bytes(ids) == "a é".encode()
    assert model.tokenizer.decode([*ids, 256, 999]) == "a é w256 w999"
    assert (model.max_context_tokens, model.vocabulary_size) == (64, 1000)


@pytest.mark.parametrize("load_format", ["dummy", "fake"])
def test_dummy_and_fake_models_need_no_tokenizer_file(tmp_path: Path, load_format: Literal["dummy", "fake"]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    served = load_served_model(ModelSettings(reference=str(tmp_path), load_format=load_format, max_context=100))
    assert (served.max_context_tokens, served.vocabulary_size) == (100, 49160)
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json"):
        load_served_model(ModelSettings(reference=str(tmp_path)))


def test_a_placeholder_never_encodes_to_ids_that_the_model_lacks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 64, "vocab_size": 100}))
    assert max(load(tmp_path, placeholder=True).tokenizer.encode("aé漢").ids) < 100


def test_a_directory_with_a_tokenizer_needs_no_placeholder(directory: Path) -> None:
    assert load(directory, placeholder=True).tokenizer.token_to_id("<|im_end|>") == 2
