"""Emulated meshes keep activation shards; plans take the slice counts that were asked for."""

import dataclasses

import jax.numpy as jnp
import pytest

from mstrain.benchmarks.cases import describe, make_cases, plan_case, products, shrink
from mstrain.benchmarks.config import load
from mstrain.gemm import LoweringOptions
from mstrain.mesh import MeshShape, make_mesh
from mstrain.models.config import ModelConfig
from mstrain.models.zoo import load_preset

GPT3 = dataclasses.replace(load_preset("gpt3_175b"), vocab_size=51200)


@pytest.mark.parametrize("model", [GPT3, load_preset("deepseek_v2_lite")], ids=lambda model: model.name)
@pytest.mark.parametrize("physical", [MeshShape(1, *shape) for shape in ((4, 4), (2, 4), (32, 8), (1, 2))])
def test_a_device_sees_the_shapes_of_the_whole_mesh(physical, model):
    whole, batch, seq = MeshShape(1, 32, 8), 128, 2048
    small, sequences = shrink(model, batch, whole, physical)
    assert sequences * seq / physical.row == batch * seq / whole.row
    for size in ("width", "heads", "num_kv_heads", "mlp_dim", "dense_mlp_dim"):
        assert (getattr(small, size) or 0) / physical.col == (getattr(model, size) or 0) / whole.col
    assert (small.head_dim, small.experts) == (model.head_dim, model.experts)


def test_what_does_not_shrink_evenly_is_refused():
    with pytest.raises(ValueError, match="heads 96 cannot shrink to 1/64"):
        shrink(GPT3, 128, MeshShape(1, 4, 64), MeshShape(1, 4, 1))
    with pytest.raises(ValueError, match="batch 16 cannot shrink"):
        shrink(GPT3, 16, MeshShape(1, 32, 8), MeshShape(1, 1, 8))


def test_a_mesh_cannot_emulate_a_smaller_one():
    with pytest.raises(ValueError, match="emulate"):
        shrink(ModelConfig(vocab_size=256), 8, MeshShape(1, 2, 2), MeshShape(1, 2, 4))


def test_every_product_has_its_own_slice_count():
    config = load(["algorithms=meshslice", "meshes=2x4", "slices=4 1 8 2"])
    (case,) = make_cases(config, config.mesh_shapes)
    plan = plan_case(case, config, make_mesh(case.mesh), None, jnp.float32)
    assert [p.slices for p in products(plan.groups[0][0]).values()] == [4, 1, 8, 2]
    assert describe(plan.groups[0][0]) == "os ls os ls S=4 1 8 2"


def test_scheduling_groups_follow_the_slice_counts(monkeypatch):
    lowering = LoweringOptions(scheduling_groups="meshslice")
    monkeypatch.setattr("mstrain.models.plan.chip_lowering", lambda chip: lowering)
    config = load(["algorithms=meshslice", "meshes=2x4", "slices=4 2 4 8"])
    (case,) = make_cases(config, config.mesh_shapes)
    plan = plan_case(case, config, make_mesh(case.mesh), None, jnp.float32)
    _, out, _, down = products(plan.groups[0][0]).values()
    assert out.scheduling.gathers == (2, 3)
    assert down.scheduling.products == (1, 2, 2, 2, 3, 3, 3, None)


def test_an_illegal_slice_count_names_legal_ones():
    config = load(["algorithms=meshslice", "meshes=2x4", "slices=4 4 5 4"])
    (case,) = make_cases(config, config.mesh_shapes)
    with pytest.raises(ValueError, match="mlp in: slice count 5 is illegal"):
        plan_case(case, config, make_mesh(case.mesh), None, jnp.float32)


def test_one_order_of_sequences_needs_one_slice_count():
    config = load(["algorithms=meshslice", "meshes=2x4", "slices=1 1 2 1", "dataflow=rs", "batch=16"])
    (case,) = make_cases(config, config.mesh_shapes)
    with pytest.raises(ValueError, match="same slice count"):
        plan_case(case, config, make_mesh(case.mesh), None, jnp.float32)
