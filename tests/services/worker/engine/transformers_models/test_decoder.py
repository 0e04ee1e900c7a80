"""Families that have no implementation here, against `transformers` itself."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import ConfigurationError
from tests.services.worker.engine.driving import Driver, load, random_ids
from tests.services.worker.engine.families import FAMILIES, OTHERS, VOCABULARY, reference_logits, save_model
from tests.services.worker.engine.test_families import as_rank, check_greedy, continued

if TYPE_CHECKING:
    from pathlib import Path

    from tests.services.worker.engine.parallel.ranks import Ranks

pytestmark = pytest.mark.extended

PROMPT = random_ids(70, VOCABULARY)
# Those that two ranks compute.
SHARED = ("starcoder2", "cohere2", "gpt neox", "nemotron", "ernie moe", "gemma4 of even heads")
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "bloom": ("Bloom", {"n_head": 4, "n_layer": 3}, "takes no position_ids"),
    "mamba": ("Mamba", {}, "linear_attention of layer_types"),
    "minimax": ("MiniMax", {}, "linear_attention of layer_types"),
    "bert": ("Bert", {"is_decoder": False}, "looks ahead"),
}


@pytest.mark.parametrize("family", OTHERS)
def test_logits_and_greedy_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    save_model(tmp_path, *OTHERS[family])
    runner = load(tmp_path)
    driver = Driver(runner)
    logits = driver.run([(driver.open(70), PROMPT)], all_tokens=True)
    torch.testing.assert_close(logits, reference_logits(tmp_path, PROMPT), atol=5e-4, rtol=1e-4)
    check_greedy(tmp_path, continued(driver))
    runner.close()


def test_rows_share_the_pages_of_a_prefix(tmp_path: Path) -> None:
    save_model(tmp_path, *OTHERS["cohere"])
    driver = Driver(load(tmp_path))
    expected = [driver.run([(driver.open(40), [*PROMPT[:32], extra])]) for extra in (3, 4)]
    first = driver.open(40)
    driver.run([(first, PROMPT[:32])])
    rows = [driver.open(40) for _ in range(2)]
    for row in rows:
        row.pages[:2] = first.pages[:2]
        row.computed = PROMPT[:32]
    got = driver.run([(rows[0], [3]), (rows[1], [4])])
    torch.testing.assert_close(got, torch.cat(expected), atol=1e-4, rtol=1e-4)


def test_a_warning_says_that_it_is_slower(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_model(tmp_path, *OTHERS["gpt2"])
    with caplog.at_level(logging.WARNING):
        load(tmp_path, load_format="dummy")
    assert "'gpt2' here: it runs through transformers with Pando's attention, slower" in caplog.text


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_logits_stay_close_to_the_reference(dtype: str, tmp_path: Path) -> None:
    save_model(tmp_path, *OTHERS["cohere"])
    driver = Driver(load(tmp_path, dtype=dtype))
    got = driver.run([(driver.open(70), PROMPT)], all_tokens=True)
    expected = reference_logits(tmp_path, PROMPT)
    assert 0 < (got - expected).norm() / expected.norm() < 0.1


@pytest.mark.parametrize("family", REFUSED)
def test_families_that_need_other_attention_are_refused(family: str, tmp_path: Path) -> None:
    name, options, complaint = REFUSED[family]
    save_model(tmp_path, name, options)
    with pytest.raises(ConfigurationError, match=complaint):
        load(tmp_path)


def test_attention_that_cannot_be_replaced_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "falcon", "hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 9}'
    )
    with pytest.raises(
        ConfigurationError, match="'falcon' cannot be served through transformers: its attention cannot"
    ):
        load(tmp_path, load_format="dummy")


@pytest.mark.parametrize("family", SHARED)
def test_two_ranks_continue_as_transformers_does(ranks: Ranks, family: str, tmp_path: Path) -> None:
    save_model(tmp_path, *OTHERS[family])
    first, second = ranks.run(as_rank, 2, str(tmp_path), "auto")
    assert first == second
    check_greedy(tmp_path, first)


def refusal_of_rank(rank: int, world_size: int, rendezvous: str, model: str) -> str:
    try:
        load(model, rank=rank, world_size=world_size, rendezvous=rendezvous).close()
    except ConfigurationError as error:
        torch.distributed.destroy_process_group()
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("family", "world_size", "complaint"),
    [
        ("stablelm", 2, "'stablelm' .* not on 2 ranks: transformers has no plan of tensor parallelism for it"),
        ("olmoe", 2, "the style 'colwise_gather_output' of layers.0.self_attn.q_proj, which is not supported"),
        ("starcoder2", 3, "on at most as many ranks as it has KV heads, 2, not on 3"),
        ("gemma4", 2, "a layer with 1 KV heads cannot be shared by 2 ranks"),
        # It thins out activations by their mean over all columns.
        ("gemma3n", 2, "'gemma3n_text' cannot be served .*: with paged attention on 2 ranks its logits are off by"),
    ],
)
def test_layers_that_ranks_cannot_share_are_refused(
    ranks: Ranks, family: str, world_size: int, complaint: str, tmp_path: Path
) -> None:
    save_model(tmp_path, *OTHERS[family])
    answers = ranks.run(refusal_of_rank, world_size, str(tmp_path))
    assert len(answers) == world_size
    assert all(re.search(complaint, answer) for answer in answers), answers


def test_each_rank_holds_its_part_of_the_layers(ranks: Ranks, tmp_path: Path) -> None:
    save_model(tmp_path, *OTHERS["ernie moe"])
    assert ranks.run(sizes_of_rank, 2, str(tmp_path)) == [[32, 16, 40, 24, 24]] * 2


def sizes_of_rank(rank: int, world_size: int, rendezvous: str, model: str) -> list[int]:
    """Return rows of query, key, gate and up matrices on this rank: dense, shared, of experts."""
    runner = load(model, rank=rank, world_size=world_size, rendezvous=rendezvous)
    # Reached into: what a rank holds shows nowhere else.
    layers: Any = runner._awake._decoder.layers  # type: ignore[attr-defined]
    mixture = layers[1].mlp
    sizes = [
        layers[0].self_attn.q_proj.weight.shape[0], layers[0].self_attn.k_proj.weight.shape[0],
        layers[0].mlp.up_proj.weight.shape[0], mixture.experts.gate_up_proj.shape[1] // 2,
        mixture.experts.down_proj.shape[2],
    ]  # fmt: skip
    runner.close()
    return sizes


CONTAINED = {
    # The text model is of a family without an implementation here, or of one with.
    "aya_vision": ("cohere2", "language_model.model."),
    "gemma3n": ("gemma3n", "model.language_model."),
    "smolvlm": ("llama", "model.text_model."),
    "mistral3": ("mistral windowed", "language_model.model."),
}


@pytest.mark.parametrize("container", CONTAINED)
def test_the_text_model_of_a_multimodal_checkpoint_is_served(container: str, tmp_path: Path) -> None:
    family, prefix = CONTAINED[container]
    alone, whole = save_model(tmp_path / "alone", *{**FAMILIES, **OTHERS}[family]), tmp_path / "whole"
    save_contained(alone, whole, container, prefix)
    driver = Driver(load(whole))
    logits = driver.run([(driver.open(70), PROMPT)], all_tokens=True)
    torch.testing.assert_close(logits, reference_logits(alone, PROMPT), atol=5e-4, rtol=1e-4)
    load(whole, load_format="dummy").close()


def save_contained(alone: Path, whole: Path, container: str, prefix: str) -> None:
    """Write the text model `alone` as checkpoints with a vision tower have it."""
    whole.mkdir()
    text = json.loads((alone / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps({"model_type": container, "text_config": text}))
    tensors = {"model.vision_tower.weight": torch.zeros(3)}
    for name, tensor in load_file(alone / "model.safetensors").items():
        if name.startswith("lm_head"):
            tensors["language_model.lm_head.weight" if prefix == "language_model.model." else name] = tensor
        else:
            tensors[prefix + name.removeprefix("model.")] = tensor
    save_file(tensors, whole / "model.safetensors", metadata={"format": "pt"})


def test_a_text_model_without_weights_is_refused(tmp_path: Path) -> None:
    save_contained(save_model(tmp_path / "alone", *OTHERS["cohere2"]), tmp_path / "whole", "aya_vision", "elsewhere.")
    with pytest.raises(
        ConfigurationError, match=r"the text model's weights are not found: lm_head.weight, model.embed_tokens.weight"
    ):
        load(tmp_path / "whole")


def test_prompts_that_are_read_in_both_directions_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "paligemma"}')
    with pytest.raises(ConfigurationError, match="'paligemma' is no decoder that generates text from left to right"):
        load(tmp_path, load_format="dummy")


def test_quantised_weights_are_refused_by_the_name_of_their_key(tmp_path: Path) -> None:
    config = {"model_type": "starcoder2", "quantization_config": {"quant_method": "awq"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigurationError, match="quantization_config: weights quantised by 'awq'"):
        load(tmp_path, load_format="dummy")


def test_the_error_of_an_unknown_family_names_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "hyperion"}')
    with pytest.raises(ConfigurationError, match="'hyperion' is neither one of Pando's own nor known to transformers"):
        load(tmp_path, load_format="dummy")


def test_without_the_library_the_error_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path, *OTHERS["starcoder2"])
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "transformers" else find(name, *rest)
    )
    with pytest.raises(ConfigurationError, match=r"pip install '\.\[transformers\]'"):
        load(tmp_path)
