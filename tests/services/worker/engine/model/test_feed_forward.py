from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn.functional import linear

from services.worker.engine.model.config import ExpertGroups, MoeConfig, RouterScores
from services.worker.engine.model.feed_forward import Router

HIDDEN, EXPERTS, CHOSEN = 32, 12, 3
MOE = MoeConfig(EXPERTS, CHOSEN, intermediate_size=16, normalizes_routing_weights=True)
SIGMOIDS = replace(MOE, scores=RouterScores.SIGMOID, has_correction=True, routing_scale=2.5)


def made_up() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return inputs, the router's matrix and its correction."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((40, HIDDEN), (EXPERTS, HIDDEN), (EXPERTS,))
    inputs, weight, correction = (torch.randn(shape, generator=generator) for shape in shapes)
    return inputs, weight, correction


def in_order(ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    order = ids.argsort(dim=1)
    return ids.gather(1, order), weights.gather(1, order)


@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (3, 1)])
@pytest.mark.parametrize("normalizes", [False, True])
def test_sigmoids_choose_in_groups_as_those_of_transformers_do(groups: tuple[int, int], normalizes: bool) -> None:
    from transformers import Glm4MoeConfig
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

    inputs, weight, correction = made_up()
    count, chosen = groups
    reference = Glm4MoeTopkRouter(
        Glm4MoeConfig(
            hidden_size=HIDDEN, n_routed_experts=EXPERTS, num_experts_per_tok=CHOSEN, n_group=count, topk_group=chosen,
            routed_scaling_factor=2.5, norm_topk_prob=normalizes,
        )
    )  # fmt: skip
    reference.load_state_dict({"weight": weight, "e_score_correction_bias": correction})
    moe = replace(SIGMOIDS, groups=ExpertGroups(count, chosen, best=2), normalizes_routing_weights=normalizes)
    ids, weights = in_order(*Router(partial(linear, weight=weight), moe, correction)(inputs))
    _, expected, expected_ids = reference(inputs)
    expected_ids, expected = in_order(expected_ids, expected)
    assert torch.equal(ids, expected_ids)
    assert torch.allclose(weights, expected)


def test_groups_may_be_ranked_by_their_best_expert() -> None:
    inputs, weight, _ = made_up()
    moe = replace(MOE, groups=ExpertGroups(4, 1, best=1), normalizes_routing_weights=False)
    ids, _ = Router(partial(linear, weight=weight), moe)(inputs)
    best = linear(inputs, weight).argmax(dim=1)
    assert torch.equal(ids // 3, (best // 3)[:, None].expand(-1, CHOSEN))


def test_a_softmax_of_the_chosen_is_that_of_all_normalised() -> None:
    inputs, weight, _ = made_up()
    ids, weights = Router(partial(linear, weight=weight), MOE)(inputs)
    logits, expected_ids = linear(inputs, weight).topk(CHOSEN)
    assert torch.equal(ids, expected_ids)
    assert torch.allclose(weights, logits.softmax(dim=1))
