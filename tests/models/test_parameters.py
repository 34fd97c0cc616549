"""Canonical parameters: the same on every mesh, restored exactly from any form, never gathered on the way."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mstrain.gemm import Span, Storage
from mstrain.hardware import once_options
from mstrain.mesh import make_mesh, parse_mesh
from mstrain.models import parameters
from mstrain.models.config import ModelConfig
from mstrain.models.plan import ParallelConfig, make_plan
from mstrain.models.transformer import Transformer
from tests.quick import FUSED, QUICK

GPT = ModelConfig(layers=4, width=64, heads=8, mlp_dim=128, vocab_size=257, context=16)
LLAMA = ModelConfig(
    layers=4, width=64, heads=8, num_kv_heads=4, mlp_dim=96, vocab_size=257, norm="rmsnorm", norm_bias=False,
    position="rotary", activation="silu", gated=True, bias="none", tied=False,
)  # fmt: skip
MIXED = ParallelConfig(attention="megatron", mlp="wang", layers="1-2:fsdp 3:mlp:summa")
CASES = {
    "wide, slices": (GPT, "2x4", ParallelConfig(slices="4", dataflow="os")),
    "tall, slices, rs": (GPT, "4x2", ParallelConfig(slices="2", dataflow="rs")),
    "tall, slices, ls": (LLAMA, "4x2", ParallelConfig(slices="2", dataflow="ls")),
    "untied, slices": (LLAMA, "2x4", ParallelConfig(slices="2")),
    "one row": (GPT, "1x8", ParallelConfig("megatron")),
    "one column": (LLAMA, "8x1", ParallelConfig("fsdp")),
    "mixed groups": (GPT, "2x4", MIXED),
    "square and copies": (LLAMA, "2x2x2", ParallelConfig("cannon")),
    "stages": (GPT, "stage2-row2-col2", ParallelConfig(slices="2")),
    "sharded copies, slices": (LLAMA, "2x2x4", ParallelConfig(slices="2"), "optimizer"),
}


@functools.cache
def module_of(case: str) -> Transformer:
    model, mesh, parallel, *shard = CASES[case]
    plan = make_plan(parallel, model, make_mesh(parse_mesh(mesh)), 16, 16, shard=(shard or ["none"])[0])
    return Transformer(model, plan, 16)


@functools.cache
def canonical(model: ModelConfig):
    """Initial parameters as one device draws them."""
    module = Transformer(model, make_plan(ParallelConfig("gspmd"), model, make_mesh(parse_mesh("1x1")), 16, 16), 16)
    return jax.device_get(jax.jit(lambda: parameters.init_canonical(module, 0), compiler_options=FUSED)())


@functools.cache
def converters(case: str):
    """Compiled from_canonical and to_canonical, between the shardings a checkpoint and a step use."""
    module = module_of(case)
    whole, parts = parameters.canonical_shardings(module), parameters.parameter_shardings(module)
    store = jax.jit(functools.partial(parameters.from_canonical, module), in_shardings=(whole,), out_shardings=parts)
    restore = jax.jit(functools.partial(parameters.to_canonical, module), in_shardings=(parts,), out_shardings=whole)
    shapes = parameters.canonical_shapes(module)
    stored = parameters.parameter_shapes(module)
    return store.lower(shapes).compile(QUICK), restore.lower(stored).compile(QUICK), whole


def assert_equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), expected)


@pytest.mark.parametrize("case", CASES)
def test_a_round_trip_through_the_stored_form_is_exact(case):
    store, restore, whole = converters(case)
    expected = canonical(CASES[case][0])
    stored = store(jax.device_put(expected, whole))
    assert_equal(restore(stored), expected)


@pytest.mark.parametrize("case", CASES)
def test_the_stored_form_has_the_planned_shapes_and_spreads_over_the_mesh(case):
    module, (store, _, whole) = module_of(case), converters(case)
    stored = store(jax.device_put(canonical(CASES[case][0]), whole))
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), parameters.parameter_shapes(module))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), stored) == shapes
    for path, leaf in jax.tree_util.tree_leaves_with_path(stored):
        if path[-1].key == "kernel":
            mesh = module.plan.mesh.shape
            stages = mesh["stage"] if path[0].key == "blocks_0" else 1
            devices = stages * mesh["row"] * mesh["col"] * (1 if module.plan.shard == "none" else mesh["data"])
            assert leaf.addressable_shards[0].data.size * devices == leaf.size, jax.tree_util.keystr(path)


@pytest.mark.parametrize("case", ["tall, slices, rs", "mixed groups", "untied, slices"])
def test_initial_parameters_do_not_depend_on_the_plan(case, monkeypatch):
    """Made where they live, by the program that training uses; bit for bit."""
    _, restore, _ = converters(case)
    monkeypatch.setattr(parameters, "once_options", lambda *of: once_options(*of) | FUSED)
    assert_equal(restore(parameters.init_parameters(module_of(case), 0)), canonical(CASES[case][0]))


def test_converted_in_turn_they_are_the_same_and_what_was_read_is_freed():
    module, (store, _, whole) = module_of("mixed groups"), converters("mixed groups")
    given = jax.device_put(canonical(GPT), whole)
    expected = jax.device_get(store(given))
    stored = parameters.from_canonical_in_turn(module, given)
    assert_equal(stored, expected)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
    parts = parameters.parameter_shardings(module)
    jax.tree.map(lambda x, sharding: x.sharding.is_equivalent_to(sharding, x.ndim) or pytest.fail(), stored, parts)


def test_initial_parameters_depend_on_the_seed():
    module = module_of("wide, slices")
    other = jax.jit(lambda: parameters.init_canonical(module, 1))()
    assert np.mean(other["blocks_0"]["mlp"]["up"]["kernel"] == canonical(GPT)["blocks_0"]["mlp"]["up"]["kernel"]) < 0.01


def test_initial_parameters_are_drawn_without_a_pass_of_the_model():
    model, module = CASES["untied, slices"][0], module_of("untied, slices")
    assert "dot_general" not in str(jax.make_jaxpr(lambda: parameters.init_canonical(module, 0))())
    assert jax.tree.structure(parameters.canonical_shapes(module)) == jax.tree.structure(canonical(model))


def gathered(compiled) -> int:
    """Elements of the largest array that an all-gather of a compiled program makes."""
    results = re.findall(r" = (\S+|\(.*?\)) all-gather(?:-start)?\(", compiled.as_text())
    shapes = [shape for result in results for shape in re.findall(r"\[([\d,]*)\]", result)]
    return max((math.prod(map(int, filter(None, shape.split(",")))) for shape in shapes), default=0)


@pytest.mark.parametrize("case", CASES)
def test_no_kernel_is_gathered_on_the_way(case):
    """With sizes that divide, conversions move shards; what is gathered is smaller than any one kernel."""
    model = CASES[case][0]
    kernels = model.width * min(model.num_kv_heads * model.head_dim, model.mlp_dim)
    for compiled in converters(case)[:2]:
        assert gathered(compiled) < kernels


def test_a_gathered_kernel_would_be_seen():
    mesh = make_mesh(parse_mesh("2x4"))
    sharding, whole = (jax.NamedSharding(mesh, spec) for spec in (jax.P("row", "col"), jax.P()))
    gather = jax.jit(lambda x: x, in_shardings=sharding, out_shardings=whole)
    assert gathered(gather.lower(jnp.zeros((64, 64))).compile()) == 64 * 64


def test_padding_is_zero_and_leaves_with_the_way_back():
    storage = Storage((5, 6), (Span(6).padded(2, 2, 4),), first=Span(5).to_multiple(8))
    x = jnp.arange(30.0).reshape(5, 6)
    stored = storage.from_canonical(x)
    assert stored.shape == (8, 8) and float(stored.sum()) == float(x.sum())
    np.testing.assert_array_equal(storage.to_canonical(stored), x)
