"""Cost of experts: exchanges by the bisection of the torus, kernels by the tiles they visit, memory by the experts of
a device."""

import dataclasses

import pytest

from mstrain.hardware.clusters import find_pod
from mstrain.hardware.expert_links import exchange_link
from mstrain.models.flops import matmul_parameters
from mstrain.models.parallel import ParallelConfig
from mstrain.models.zoo import load_preset
from mstrain.parallel.token_exchange import TokenExchange
from mstrain.planner.cost import cost_step
from mstrain.planner.execution import style_named
from mstrain.planner.experts import grouped_seconds
from mstrain.planner.plan import PodPlan, plan_products
from mstrain.planner.request import Fixed, PlanRequest
from mstrain.planner.search import layouts, search
from mstrain.planner.simulated import simulate_plan
from tests.docs import expert_steps

MIXTRAL = dataclasses.replace(load_preset("mixtral_8x7b"), layers=4)
POD = find_pod("v5p-256")  # 4 x 4 x 8 chips, all axes closed
REQUEST = PlanRequest(MIXTRAL, POD, (ParallelConfig("fsdp"),), 256, 4096, fixed=Fixed(schedule="1f1b"))


def costed(**plan):
    found = cost_step(REQUEST, PodPlan(data=128, parallel=ParallelConfig("fsdp"), rows=1, cols=1, remat="full", **plan))
    assert found is not None
    return found


@pytest.mark.parametrize("expert, longest", [(8, 8), (4, 4)])
def test_half_of_what_is_exchanged_crosses_the_middle_of_the_longest_axis(expert, longest):
    link, one = exchange_link(POD, (1, 128, 1, 1, 1), expert), POD.links((1, 1, 1, 1, 1)).replica.permute
    assert link.bandwidth == pytest.approx(8 * one.bandwidth / longest)  # a closed ring has two links at each end


def test_an_axis_that_is_a_part_of_a_torus_axis_is_an_open_line():
    link, one = exchange_link(POD, (1, 128, 1, 1, 1), 2), POD.links((1, 1, 1, 1, 1)).replica.permute
    assert link.bandwidth == pytest.approx(4 * one.bandwidth / 2)


def test_slices_leave_one_part_of_the_exchange_exposed():
    assert TokenExchange(0.5, 0.0, 2.0).seconds(4) == pytest.approx((0.25, 0.25))
    assert TokenExchange(0.5, 0.0, 0.5).seconds(4) == pytest.approx((0.25 + 0.75 * 0.5, 0.25))
    assert TokenExchange(0.5, 0.0, 2.0).cheapest((1, 2, 4, 8)) == 8
    assert TokenExchange(0.5, 0.2, 2.0, add=0.1).cheapest((1, 2, 4, 8)) == 2


def test_tiles_of_two_experts_are_multiplied_twice():
    bandwidth = POD.chip.number("hbm_bandwidth")
    one, eight = (grouped_seconds(POD, bandwidth, (16384, 4096, 14336), groups) for groups in (1, 8))
    assert eight / one == pytest.approx((16384 / 512 + 7) / (16384 / 512), rel=0.01)


def test_a_narrow_tile_reads_so_much_again_that_memory_limits_it():
    pod = find_pod("v6e-256")
    own, narrow = (
        grouped_seconds(pod, pod.chip.number("hbm_bandwidth"), (65536, 4096, 28672), 8, tile=tile)
        for tile in (None, (512, 512, 512))
    )
    assert narrow > 1.5 * own


def test_experts_divided_among_replicas_need_less_memory_and_exchange_tokens():
    whole, parts = costed(), costed(expert=8)
    experts = MIXTRAL.layers * 8 * 3 * MIXTRAL.width * MIXTRAL.mlp_dim
    assert whole.fullest.parameters - parts.fullest.parameters == pytest.approx(4 * experts * 7 / 8)
    assert parts.terms.tensor_exposed > whole.terms.tensor_exposed
    assert parts.terms.gradient_sum < whole.terms.gradient_sum


def test_the_search_divides_experts_among_replicas_of_models_with_experts_only():
    assert {layout.expert for layout in layouts(REQUEST)} == {1, 2, 4, 8}
    assert search(
        dataclasses.replace(REQUEST, fixed=Fixed(data=32, pipeline=4, remat="full")), best_only=True
    ).trainable
    dense = dataclasses.replace(REQUEST, model=load_preset("gpt2"))
    assert {layout.expert for layout in layouts(dense)} == {1}


DEEPSEEK = load_preset("deepseek_v3")


@pytest.mark.parametrize("style", [None, "megatron"])
def test_products_of_all_layers_multiply_what_the_flops_of_the_model_count(style):
    stated = style and style_named(style)
    request = PlanRequest(DEEPSEEK, POD, (ParallelConfig(),), 256, 4096, stated_style=stated)
    products = plan_products(request, PodPlan(256, ParallelConfig(), 1, 1))
    layers = sum(
        count * share * sum(product.layout.multiplications for product in block)
        for kind, (_, count) in zip(products.kinds, request.layer_groups, strict=True)
        for block, share in kind.groups
    )
    routers = DEEPSEEK.layer_groups[-1][1] * DEEPSEEK.width * DEEPSEEK.experts
    assert layers + products.head.layout.multiplications == matmul_parameters(DEEPSEEK) - routers


def test_stages_divide_the_layers_behind_the_first_dense_ones_which_all_stages_hold():
    model = dataclasses.replace(DEEPSEEK, balance_loss=0.0)  # with it, stages have equally many layers
    request = dataclasses.replace(REQUEST, model=model)
    found = cost_step(request, PodPlan(32, ParallelConfig("fsdp"), 1, 1, 4, 8, "full", "optimizer"))
    assert [stage.holds for stage in found.stages] == [(3, 15), (3, 15), (3, 14), (3, 14)]
    assert [stage.computes for stage in found.stages] == [(0, 15), (0, 15), (0, 15), (3, 15)]
    assert found.stages[0].chunks == ((0, 18),)
    simulated = simulate_plan(request, found)
    assert simulated.result.seconds == pytest.approx(simulated.predicted_seconds, rel=0.1)


def test_compiled_steps_of_mixtral_take_about_as_long_as_the_planner_says():
    """Whole steps on 256 chips (docs/data/expert_steps.csv): FSDP, and experts over an axis of their own."""
    ratios = [expert_steps.planned(row) / float(row["ms"]) for row in expert_steps.read()]
    assert len(ratios) >= 4 and all(0.85 < ratio < 1.15 for ratio in ratios), ratios
