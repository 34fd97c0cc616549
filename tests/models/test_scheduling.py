"""The scheduling groups of a layer's backward pass: which plans have them."""

import dataclasses

import pytest

from mstrain.gemm.scheduling import SchedulingGroups
from mstrain.hardware import chip_named
from mstrain.mesh import abstract_mesh, parse_mesh
from mstrain.models.config import ModelConfig
from mstrain.models.parallel import ParallelConfig
from mstrain.models.plan import make_plan
from mstrain.models.zoo import load_preset

GPT = ModelConfig(layers=4, width=512, heads=8, vocab_size=1024, context=128)
FOUR = ParallelConfig(slices="4")


def groups_of(model=GPT, parallel=FOUR, mesh="2x4", chip="tpu7x"):
    """The scheduling groups of the four products of every block of a plan."""
    plan = make_plan(parallel, model, abstract_mesh(parse_mesh(mesh)), 16, 128, chip_named(chip))
    return [[product.scheduling for product in block.products] for block, _ in plan.every_group]


def test_gathers_of_the_output_projection_run_beside_products_of_the_mlp():
    assert groups_of() == [[
        None,
        SchedulingGroups(gathers=(2, 3, 4, None)),
        SchedulingGroups(last_sum=1),
        SchedulingGroups(products=(1, 2, 3, 4)),
    ]]  # fmt: skip


@pytest.mark.parametrize("parallel", [ParallelConfig("collective"), ParallelConfig(slices="1")], ids=str)
def test_a_whole_gather_runs_beside_the_other_weight_gradient_of_the_mlp(parallel):
    assert groups_of(parallel=parallel) == [[
        None,
        SchedulingGroups(gathers=(2,)),
        SchedulingGroups(last_sum=1, products=(2,)),
        SchedulingGroups(products=(1,)),
    ]]  # fmt: skip


@pytest.mark.parametrize("changed", [
    {"chip": "v6e"}, {"chip": "v5p"}, {"mesh": "8x1"}, {"mesh": "stage2-row2-col2"},
    {"parallel": ParallelConfig("wang")}, {"parallel": ParallelConfig(mlp="collective", slices="2")},
    {"parallel": ParallelConfig(slices="4", dataflow="os")}, {"parallel": ParallelConfig(slices="4", layers="0:fsdp")},
    {"model": load_preset("deepseek_v2_lite")}, {"model": dataclasses.replace(GPT, mtp_layers=1)},
], ids=str)  # fmt: skip
def test_other_plans_have_no_groups(changed):
    assert {group for block in groups_of(**changed) for group in block} == {None}
