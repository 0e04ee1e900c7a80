"""The random adapters of the experiment: a server takes each for another one, and they fit the model."""

from __future__ import annotations

import json
from pathlib import Path

from deploy.evaluation.experiments.random_adapters import MODULES, adapter_names, make_adapters
from services.worker.engine.adapters.files import read_adapter

LAYERS = 2


def test_made_adapters_have_the_modules_of_the_model_and_digests_of_their_own(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    shape = json.loads(Path("deploy/evaluation/shapes/llama-3.1-8b/config.json").read_text(encoding="utf-8"))
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    small |= {"num_key_value_heads": 2, "head_dim": 16}
    (model / "config.json").write_text(json.dumps({**shape, **small}), encoding="utf-8")
    made = make_adapters(model, tmp_path, rank=8, count=5)
    assert list(made) == adapter_names(5)
    files = [read_adapter(Path(directory)) for directory in made.values()]
    assert len({file.digest for file in files}) == 5
    for file in files:
        assert file.rank == 8
        assert len(file.modules) == LAYERS * len(MODULES)
        assert file.modules["model.layers.0.mlp.down_proj"].a.shape == (8, 96)
