"""mesh=auto: legal meshes that the torus carries, those that fit in memory first; slices from devices."""

import dataclasses
import itertools
from types import SimpleNamespace

import pytest

from mstrain.hardware import chip_named, parse_target, tpu_slice_of
from mstrain.hardware.clusters import find_pod
from mstrain.hardware.pod import tuning_constants
from mstrain.hardware.torus_parts import torus_parts
from mstrain.mesh import MeshShape, abstract_mesh, parse_mesh
from mstrain.models.auto import tune_products
from mstrain.models.config import ModelConfig
from mstrain.models.parallel import ParallelConfig
from mstrain.models.plan import chip_lowering, make_plan
from mstrain.models.zoo import load_preset
from mstrain.parallel.tune import TIE
from mstrain.planner.cost import cost_step
from mstrain.planner.plan import PodPlan
from mstrain.planner.request import TENSOR, Fixed, PlanRequest
from mstrain.planner.search import search
from tests.planner.absent import absent_devices
from tests.planner.plans import ranked

SLICE = parse_target("v5p-64")
WHOLE = ParallelConfig(rows="sequences")
SMALL = ModelConfig(name="small", layers=2, width=1024, heads=4, vocab_size=1024)


def shapes(candidates):
    return [candidate.shape for candidate in candidates]


@pytest.mark.parametrize("parallel", [ParallelConfig(), ParallelConfig(layers="0:megatron 1:mlp:wang")])
def test_only_meshes_with_a_legal_plan_remain(parallel):
    legal = shapes(ranked(SMALL, 16, 256, SLICE, parallel=parallel))
    assert max(shape.col for shape in legal) == SMALL.heads
    for data in (1, 2, 4, 8, 16, 32):
        for row, col in SLICE.mesh_shapes(data) if data in (1, 2, 4, 8, 16) else ():
            shape = MeshShape(data, row, col)
            asked = parallel, SMALL, abstract_mesh(shape), 16, 256, SLICE.chip
            if shape in legal:
                make_plan(*asked)
            else:
                with pytest.raises(ValueError, match="heads|sequences|divide"):
                    make_plan(*asked)


def test_few_sequences_leave_few_rows():
    many = dataclasses.replace(SMALL, heads=32, num_kv_heads=32, head_dim=32)
    few = shapes(ranked(many, 2, 256, SLICE, parallel=WHOLE))
    assert few and all(shape.data * shape.row <= 2 for shape in few)
    split = shapes(ranked(many, 2, 256, SLICE))
    assert set(few) < set(split) and max(shape.row for shape in split) > 2


def test_the_refusal_says_what_to_type_when_nothing_is_legal():
    with pytest.raises(ValueError, match="Type|Choose"):
        ranked(SMALL, 1, 256, SLICE, parallel=WHOLE)


def test_a_torus_carries_what_its_axes_can_form():
    found = shapes(ranked(SMALL, 16, 256, SLICE))
    physical = SLICE.physical_axes
    for shape in (shape for shape in found if shape.stage == 1):
        parts = torus_parts(physical, (1, shape.data, 1, shape.row, shape.col))
        for axis in parts[3:] if parts else pytest.fail(f"{shape} is not on the torus"):
            assert len(axis) < 2 or all(part.size == physical[part.axis] for part in axis)
    assert set(found) <= set(shapes(ranked(SMALL, 16, 256, SLICE.chip, 32)))


def test_what_fits_comes_before_what_is_faster():
    model = load_preset("gpt3_175b")
    small = ranked(model, 32, 2048, SLICE)
    assert not any(costed.fits for costed in small)  # its state alone is larger than the memory
    large = ranked(model, 256, 2048, parse_target("v5p-1024"), remat="full")
    order = [(not costed.fits, costed.seconds) for costed in large]
    assert large[0].fits and order == sorted(order)


@pytest.mark.parametrize(
    ("name", "kind"), [("v5p-64", "v5p"), ("v4-64", "v4"), ("v6e-32", "v6e"), ("v3-32", "v3")]
)  # fmt: skip
def test_devices_tell_which_slice_they_are(name, kind):
    tpu_slice = parse_target(name)
    found = absent_devices(tpu_slice, origin=(0, 4, 0))
    assert found[0].device_kind == chip_named(kind).device_kinds[0]
    assert tpu_slice_of(found).topology_name == tpu_slice.topology_name
    assert tpu_slice_of(found).mesh_shapes() == tpu_slice.mesh_shapes()
    assert tpu_slice_of(found[:-1]) is None  # some are missing


def test_other_devices_are_no_slice():
    assert tpu_slice_of([SimpleNamespace(device_kind="cpu")]) is None
    assert tpu_slice_of([SimpleNamespace(device_kind="NVIDIA H200")]) is None


def test_the_same_mesh_is_chosen_for_a_slice_present_and_absent():
    absent = ranked(SMALL, 16, 256, SLICE)
    assert shapes(ranked(SMALL, 16, 256, tpu_slice_of(absent_devices(SLICE)))) == shapes(absent)
    assert absent[0].shape != MeshShape(1, 1, 32)


@pytest.mark.parametrize("target, mesh", [("v5p-64", "4x8"), ("v6e-256", "16x16"), ("tpu7x-256", "32x8")])
def test_all_products_have_slices_and_few_where_more_gain_little(target, mesh):
    shape, tpu_slice = parse_mesh(mesh), parse_target(target)
    chip, constants, model = tpu_slice.chip, tuning_constants(tpu_slice, shape), load_preset("gpt3_175b")
    plan = make_plan(ParallelConfig(), model, abstract_mesh(shape), shape.devices // 2, 2048, chip, constants)
    products = plan.groups[0][0].products
    assert all(1 < p.slices <= chip.most_slices for p in products)
    tuned = tune_products(model, ParallelConfig(), (shape.row, shape.col), shape.devices // 2 * 2048, chip, constants)
    for product, choice in zip(products, tuned.values(), strict=True):
        seconds = dict(choice.trials)
        assert seconds[product.slices] <= (1 + TIE) * min(seconds.values())
        assert all(time > (1 + TIE) * min(seconds.values()) for s, time in seconds.items() if s < product.slices)
    assert {p.lowering for p in (*products, plan.head)} == {chip_lowering(chip)}


@pytest.mark.parametrize("target", ["v5p-64", "v6e-32", "tpu7x-32", "tpu7x-256"])
def test_automatic_slices_and_dataflows_never_lose_to_collective(target):
    """The tuner has the links, rates and overlap of the planner."""
    pod, lost = find_pod(target), {}
    for name, (rows, cols) in itertools.product(("gpt3_175b", "gpt3_1_3b"), pod.meshes(1)):
        plans = [PodPlan(1, ParallelConfig(kind), rows, cols, 1, 1, "full") for kind in ("meshslice", "collective")]
        request = PlanRequest(load_preset(name), pod, (ParallelConfig(),), pod.devices // 2, 2048)
        found = [cost_step(request, plan) for plan in plans]
        if all(found) and found[0].seconds > 1.001 * found[1].seconds:
            lost[name, rows, cols] = found[0].seconds / found[1].seconds
    assert lost == {}


def test_no_product_is_sliced_where_nothing_overlaps():
    mesh = abstract_mesh(MeshShape(1, 4, 8))
    plan = make_plan(ParallelConfig(), load_preset("gpt3_175b"), mesh, 16, 2048, chip_named("v3"))
    assert {p.slices for p in (*plan.groups[0][0].products, plan.head)} == {1}


SMALL_SLICES = ("v5p:2x2x1", "v5p:2x2x4", "v6e:2x2", "v6e:4x4", "tpu7x:2x2x1", "tpu7x:2x2x2")


@pytest.mark.parametrize("target, name", itertools.product(SMALL_SLICES, ("gpt3_1_3b", "llama3_8b")))
def test_on_four_to_sixteen_chips_meshslice_is_the_best(target, name):
    """Four sequences a device, nothing computed again, every mesh and `shard`; Llama 3 8B does not fit four v6e.

    Mostly because over rows alone it is FSDP's program.
    """
    pod, fixed = find_pod(target), Fixed(pipeline=1, context=1, schedule="1f1b", remat="none")
    found = {}
    for kind in TENSOR:
        parallel = (ParallelConfig(kind),)
        result = search(
            PlanRequest(load_preset(name), pod, parallel, 4 * pod.devices, 2048, fixed=fixed), best_only=True
        )
        found[kind] = min((costed.seconds for costed in result.trainable), default=None)
    if (target, name) == ("v6e:2x2", "llama3_8b"):
        assert set(found.values()) == {None}
    else:
        assert found["meshslice"] <= 1.001 * min(filter(None, found.values()))
