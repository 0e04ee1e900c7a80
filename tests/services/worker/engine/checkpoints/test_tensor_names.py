from __future__ import annotations

import pytest

from services.worker.engine.checkpoints.tensor_names import StoredTensor, stored_tensor

NAMES = {
    "mlp.gate": "block_sparse_moe.router.layer",
    "mlp.experts.*.gate_proj": "block_sparse_moe.experts.*.w1",
    "mlp.experts.*.gate_up_proj": "block_sparse_moe.input_linear",
    "mlp.experts.*.down_proj.weight": "mlp.experts.down_proj",
    "model.norm": "model.final_layernorm",
}


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("model.layers.12.mlp.gate.weight", StoredTensor("model.layers.12.block_sparse_moe.router.layer.weight")),
        ("model.layers.0.self_attn.q_proj.bias", StoredTensor("model.layers.0.self_attn.q_proj.bias")),
        ("model.norm.weight", StoredTensor("model.final_layernorm.weight")),
        ("lm_head.weight", StoredTensor("lm_head.weight")),
        (
            "model.layers.1.mlp.experts.31.gate_proj.weight_scale",
            StoredTensor("model.layers.1.block_sparse_moe.experts.31.w1.weight_scale"),
        ),
        (
            "model.layers.1.mlp.experts.31.up_proj.weight",
            StoredTensor("model.layers.1.mlp.experts.31.up_proj.weight"),
        ),
        (
            "model.layers.1.mlp.experts.31.gate_up_proj.weight",
            StoredTensor("model.layers.1.block_sparse_moe.input_linear.weight", 31),
        ),
        (
            "model.layers.1.mlp.experts.31.down_proj.weight",
            StoredTensor("model.layers.1.mlp.experts.down_proj", 31),
        ),
    ],
)
def test_a_family_s_names_are_those_of_its_files(name: str, stored: StoredTensor) -> None:
    assert stored_tensor(name, NAMES) == stored
