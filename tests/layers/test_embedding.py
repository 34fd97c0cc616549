"""Embeddings: looked up as from a whole table, with gradients summed in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from mstrain.gemm import Layout, Plan, Span, grid_of
from mstrain.layers.embedding import Embedding, Positions
from mstrain.layers.parameter import partition_specs
from tests.gemm.products import mesh_of
from tests.layers.random_parameters import storages
from tests.quick import QUICK

VOCABULARY, WIDTH, PADDING = 30, 16, 2
NORMAL = nn.initializers.normal(1.0)


def embedding(algorithm="meshslice", mesh="2x4", dtype=jnp.float32):
    grid = grid_of(algorithm, mesh_of(mesh))
    grid = grid.swapped if algorithm == "megatron" else grid
    return Embedding(grid, Span(VOCABULARY).to_multiple(VOCABULARY + PADDING), Span(WIDTH), NORMAL, dtype)


def sharded_table(module):
    boxed = module.init(jax.random.key(0), jnp.zeros(32, jnp.int32))["params"]["table"]
    return jax.device_put(boxed.value, jax.NamedSharding(module.grid.mesh, boxed.spec))


def look_up(module, table, tokens, g):
    def program(table, tokens, g):
        y, backward = jax.vjp(lambda table: module.apply({"params": {"table": table}}, tokens), table)
        return y, backward(g)[0]

    return jax.jit(program).lower(table, tokens, g).compile(compiler_options=QUICK)(table, tokens, g)


@pytest.mark.parametrize(
    "algorithm, mesh", [("meshslice", "2x4"), ("meshslice", "2x2x2"), ("megatron", "2x4"), ("fsdp", "2x4")]
)
def test_lookup_and_gradient_equal_indexing_the_whole_table(algorithm, mesh):
    module = embedding(algorithm, mesh)
    rng = np.random.default_rng(4)
    tokens = jnp.asarray(rng.integers(0, VOCABULARY, 32), jnp.int32)
    g = jnp.asarray(rng.standard_normal((32, WIDTH)), jnp.float32)
    table = sharded_table(module)
    y, slope = look_up(module, table, tokens, g)
    whole = np.asarray(table)
    np.testing.assert_array_equal(y, whole[np.asarray(tokens)])
    want = np.zeros_like(whole)
    np.add.at(want, np.asarray(tokens), np.asarray(g))
    np.testing.assert_allclose(slope, want, rtol=1e-5, atol=1e-5)
    assert not np.asarray(slope[VOCABULARY:]).any() and not whole[VOCABULARY:].any()
    assert y.sharding.is_equivalent_to(module.grid.sharding(module.grid.layout.spec), 2)
    assert slope.sharding.is_equivalent_to(table.sharding, 2)


def test_gradient_of_a_frequent_token_does_not_stall_in_bfloat16():
    """Adding ones in bfloat16 stops at 256; each device here sums 2048 of them."""
    module = embedding(dtype=jnp.bfloat16)
    tokens = jnp.full(4096, 7, jnp.int32)
    y, slope = look_up(module, sharded_table(module), tokens, jnp.ones((4096, WIDTH), jnp.bfloat16))
    assert y.dtype == jnp.bfloat16 and slope.dtype == jnp.float32
    assert (np.asarray(slope)[7] == 4096).all()


def test_initial_table_does_not_depend_on_the_mesh():
    def canonical(module):
        boxed = module.init(jax.random.key(0), jnp.zeros(32, jnp.int32))["params"]
        return storages(boxed)["table"].to_canonical(boxed["table"].value), partition_specs(boxed)["table"]

    (one, one_spec), (other, other_spec) = canonical(embedding()), canonical(embedding("fsdp"))
    np.testing.assert_array_equal(one, other)
    assert one.shape == (VOCABULARY, WIDTH) and one_spec != other_spec


@pytest.mark.parametrize("flow", ["os", "rs"])
def test_tied_kernel_is_the_table_transposed(flow):
    grid = grid_of("meshslice", mesh_of("2x4"))
    plan, module = Plan("meshslice", flow, grid), embedding()
    table = sharded_table(module)
    program = jax.jit(lambda table: module.apply({"params": {"table": table}}, plan, method="head_kernel"))
    kernel = program(table)
    np.testing.assert_array_equal(kernel, np.asarray(table).T)
    assert kernel.sharding.is_equivalent_to(grid.sharding(grid.weight_spec), 2)


def test_positions_count_from_the_start_of_every_sequence():
    mesh, layout = mesh_of("2x4"), Layout(("data", "row"), ("col",))
    module = Positions(layout, mesh, context=12, width=Span(WIDTH), initializer=NORMAL)
    x = jnp.zeros((24, WIDTH))
    boxed = module.init(jax.random.key(0), x, jnp.arange(8))
    table = boxed["params"]["table"].value
    y = jax.jit(lambda p, x: module.apply(p, x, jnp.arange(8)))(nn.meta.unbox(boxed), x)
    np.testing.assert_array_equal(y, np.tile(np.asarray(table)[:8], (3, 1)))
