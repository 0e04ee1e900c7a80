"""What directories of sentence-transformers say, the bundled encoder's included."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from common.errors import ConfigurationError
from common.models import resolve_model
from common.settings import ModelSettings
from common.tokenization import load_served_model, served_traits
from common.tokenization.directory import read_directory, read_pooling, read_prompts
from common.tokenization.parts import PairStyle
from common.types import Pooling

if TYPE_CHECKING:
    from pathlib import Path

ENCODER = "all-minilm-l6-v2"
MODULES = "sentence_transformers.models"


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def directory(path: Path, *modules: str, **pooling: bool) -> Path:
    write(path / "modules.json", [{"type": f"{MODULES}.{name}", "path": name} for name in modules])
    write(path / "Pooling" / "config.json", {"word_embedding_dimension": 8, **pooling})
    return path


@pytest.mark.parametrize(
    ("flag", "pooling"),
    [
        ("pooling_mode_cls_token", Pooling.FIRST),
        ("pooling_mode_mean_tokens", Pooling.MEAN),
        ("pooling_mode_lasttoken", Pooling.LAST),
    ],
)
def test_the_pooling_module_says_how(tmp_path: Path, flag: str, pooling: Pooling) -> None:
    flags = {"pooling_mode_max_tokens": False, flag: True}
    assert read_pooling(directory(tmp_path, "Transformer", "Pooling", "Normalize", **flags)) is pooling


def test_without_pooling_files_no_pooling_is_returned(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) is None
    assert read_pooling(directory(tmp_path, "Transformer")) is None


@pytest.mark.parametrize(
    ("modules", "flags", "complaint"),
    [
        (("Transformer", "Pooling", "Dense"), {"pooling_mode_mean_tokens": True}, "Dense"),
        (("Transformer", "Pooling"), {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
        (("Transformer", "Pooling"), {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "not supp"),
        (("Transformer", "Pooling"), {}, "no pooling"),
    ],
)
def test_modules_that_would_change_the_embeddings_are_refused(
    tmp_path: Path, modules: tuple[str, ...], flags: dict[str, bool], complaint: str
) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        read_pooling(directory(tmp_path, *modules, **flags))


def test_the_bundled_encoder_has_the_limits_and_the_pooling_of_its_files() -> None:
    model = load_served_model(ModelSettings(reference=ENCODER))
    # 512 positions, but it was made for 256 tokens.
    assert model.max_context_tokens == 256
    assert model.embedding.is_encoder
    assert (model.embedding.pooling, model.embedding.dimensions) == (Pooling.MEAN, 384)
    assert not model.chat_templates


def test_the_bundled_encoder_s_tokenizer_neither_truncates_nor_pads() -> None:
    # Its tokenizer.json asks for both, at 128 tokens.
    tokenizer = load_served_model(ModelSettings(reference=ENCODER)).tokenizer
    assert tokenizer.encode("Hello, World!").tokens == ["[CLS]", "hello", ",", "world", "!", "[SEP]"]
    assert len(tokenizer.encode("word " * 300).ids) == 302


def test_the_bundled_encoder_s_texts_are_encoded_as_transformers_does() -> None:
    import transformers

    reference = transformers.AutoTokenizer.from_pretrained(resolve_model(ENCODER).path)
    tokenizer = load_served_model(ModelSettings(reference=ENCODER)).tokenizer
    for text in (
        "",
        " ",
        "Ünïcode naïve CAFÉ",
        "中文 and 한국어",
        "don't-stop_now",
        "a\u200bb\x00c",
        "🙂🙃",
        "x" * 150,
    ):
        assert tokenizer.encode(text).ids == reference(text)["input_ids"], text


def test_the_setting_wins_over_the_files() -> None:
    model = load_served_model(ModelSettings(reference=ENCODER, pooling="cls"))
    assert model.embedding.pooling is Pooling.FIRST
    decoder = load_served_model(ModelSettings())
    assert (decoder.embedding.pooling, decoder.embedding.dimensions) == (Pooling.LAST, 576)
    assert load_served_model(ModelSettings(pooling="mean")).embedding.pooling is Pooling.MEAN
    with pytest.raises(ConfigurationError, match="cls is only for encoders"):
        load_served_model(ModelSettings(pooling="cls"))


def test_roberta_counts_positions_from_after_the_padding_index(tmp_path: Path) -> None:
    load_served_model(ModelSettings(reference=ENCODER)).tokenizer.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path / "config.json", {"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1})
    parts = read_directory(tmp_path)
    assert parts.max_context_tokens == 512
    assert parts.embedding.pooling is Pooling.MEAN


def test_prompts_are_read_by_name(tmp_path: Path) -> None:
    assert read_prompts(tmp_path) == ({}, None)
    prompts = {"query": "Instruct: find\nQuery:", "document": ""}
    write(tmp_path / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": "document"})
    assert read_prompts(tmp_path) == (prompts, "document")
    write(tmp_path / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": "passage"})
    with pytest.raises(ConfigurationError, match="'passage' is none of its prompts"):
        read_prompts(tmp_path)


def decoder(path: Path, *, ends: bool, pools: bool) -> Path:
    """Write the text files of a decoder, which ends texts with `</s>` by its configuration."""
    tokenizer = Tokenizer(WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3, "<unk>": 4}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    start = "<s> $A </s>" if ends else "<s> $A"
    tokenizer.post_processor = TemplateProcessing(single=start, special_tokens=[("<s>", 0), ("</s>", 1)])
    tokenizer.save(str(path / "tokenizer.json"))
    write(path / "tokenizer_config.json", {"eos_token": "</s>", "add_eos_token": True})
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 5, "hidden_size": 8}
    write(path / "config.json", {**config, "max_position_embeddings": 64})
    if pools:
        directory(path, "Transformer", "Pooling", "Normalize", pooling_mode_lasttoken=True)
    return path


@pytest.mark.parametrize(
    ("ends", "pools", "expected"), [(False, True, [0, 2, 1]), (True, True, [0, 2, 1]), (False, False, [0, 2])]
)
def test_texts_to_embed_end_with_the_end_of_sequence_where_the_model_s_files_say_so(
    tmp_path: Path, ends: bool, pools: bool, expected: list[int]
) -> None:
    parts = read_directory(decoder(tmp_path, ends=ends, pools=pools))
    assert parts.tokenizer.encode("a").ids == expected
    assert (parts.embedding.only_embeds, parts.embedding.generates) == (pools, not pools)
    assert parts.embedding.pooling is Pooling.LAST


def test_settings_make_a_reranker_of_a_model_that_generates(tmp_path: Path) -> None:
    reference = str(decoder(tmp_path, ends=False, pools=False))
    plain = load_served_model(ModelSettings(reference=reference)).embedding
    assert (plain.head, plain.pair_style) == (None, PairStyle.TOKENIZER)
    settings = ModelSettings(reference=reference, classifier_from_token=("no", "yes"))
    reranker = load_served_model(settings).embedding
    assert reranker == served_traits(settings)
    assert reranker.head is not None
    assert (reranker.head.scores_pairs, reranker.generates) == (True, False)
    assert reranker.pair_style is PairStyle.QWEN3_RERANKER
    other = load_served_model(settings.model_copy(update={"pair_style": "tokenizer"})).embedding
    assert other.pair_style is PairStyle.TOKENIZER
    with pytest.raises(ConfigurationError, match="this is an encoder"):
        load_served_model(ModelSettings(reference=ENCODER, classifier_from_token=("no", "yes")))


@pytest.mark.parametrize(
    ("config", "style"),
    [
        ({"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1}, PairStyle.QWEN3_RERANKER),
        ({"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 3}, PairStyle.TOKENIZER),
        ({"classifier_from_token": ["no", "yes"]}, PairStyle.QWEN3_RERANKER),
    ],
)
def test_the_notation_of_pairs_follows_from_the_configuration(
    tmp_path: Path, config: dict[str, Any], style: PairStyle
) -> None:
    path = decoder(tmp_path, ends=False, pools=False)
    write(path / "config.json", {**json.loads((path / "config.json").read_text()), **config})
    assert read_directory(path).embedding.pair_style is style
