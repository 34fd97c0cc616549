"""A whole transformer block, forward and backward: only products and norm statistics communicate."""

import collections
import math
import re

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

from mstrain.layers.parameter import partition_specs
from mstrain.mesh import MeshShape, make_mesh
from mstrain.models.config import ModelConfig
from mstrain.models.plan import ParallelConfig, make_plan
from mstrain.models.transformer import Block
from tests.gemm.programs import collectives, operations
from tests.quick import QUICK

SEQUENCES, SEQ, WIDTH, SLICES, PRODUCTS, NORMS = 16, 8, 64, 2, 4, 2
MODELS = {
    "gpt": {"position": "none"},
    "llama": {
        "norm": "rmsnorm", "norm_bias": False, "position": "rotary", "gated": True, "bias": "none",
        "num_kv_heads": 4, "activation": "silu", "mlp_dim": 128, "tied": False,
    },
}  # fmt: skip
MESHES = {"2x4": MeshShape(1, 2, 4), "4x2": MeshShape(1, 4, 2), "2x2x4": MeshShape(2, 2, 4)}


def lowered_block(model, mesh, dataflow="auto", reshard=False):
    """Value and all gradients of one block; with `reshard`, a layout mistake as this file hunts."""
    model = ModelConfig(layers=1, width=WIDTH, heads=8, vocab_size=64, **MODELS[model])
    mesh = make_mesh(MESHES[mesh])
    parallel = ParallelConfig(slices=str(SLICES), dataflow=dataflow)
    plan = make_plan(parallel, model, mesh, SEQUENCES, SEQ).groups[0][0]
    block = Block(model, plan, SEQ)

    def abstract(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(mesh, spec))

    x = abstract((SEQUENCES * SEQ, WIDTH), plan.attention.residual.spec)
    boxed = jax.eval_shape(block.init, jax.random.key(0), x, jnp.int32(SEQ))
    params = jax.tree.map(lambda p, s: abstract(p.shape, s), nn.meta.unbox(boxed), partition_specs(boxed))

    def program(params, x, g):
        def forward(params, x):
            if reshard:
                x = jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, jax.P("col", "row")))
            return block.apply(params, x, jnp.int32(SEQ))[0]

        y, backward = jax.vjp(forward, params, x)
        return y, backward(g)

    return jax.jit(program).lower(params, x, x)


def compiled_collectives(text):
    """{kind: [shape of every result]} of compiled HLO."""
    found = collections.defaultdict(list)
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
    for types, kind in re.findall(rf"= ([^=]*?) ({kinds})(?:-start)?\(", text):
        shapes = re.findall(r"\w+\[([\d,]*)\]", types)
        found[kind] += [tuple(map(int, filter(None, shape.split(",")))) for shape in shapes]
    return found


def check_block(lowered):
    """Asserts that the partitioner added nothing to the collectives which the products asked for by hand."""
    asked = collections.Counter((op.kind, op.out_shape) for op in collectives(operations(lowered.as_text())))
    found = compiled_collectives(lowered.compile(compiler_options=QUICK).as_text())
    assert not set(found) & {"all-to-all", "collective-permute", "collective-broadcast"}, "resharding"
    for kind in ("all-gather", "reduce-scatter"):
        made = collections.Counter((kind.replace("-", "_"), shape) for shape in found[kind])
        assert made, "the block communicates"
        assert made <= asked, f"{kind} beyond those of the products: {made - asked}"
    for shape in found["all-reduce"]:
        # One number per token (norm statistics), one per feature (gradients of scales and biases), and the
        # sum of weight gradients over data-parallel replicas.
        dims = [dim for dim in shape if dim > 1]
        assert len(dims) <= 1 or ("all_reduce", shape) in asked, f"an all-reduce of {shape}"
        assert math.prod(shape) <= SEQUENCES * SEQ * 4 or ("all_reduce", shape) in asked


@pytest.mark.parametrize(
    "model, mesh, dataflow",
    [
        ("gpt", "2x4", "auto"),
        ("gpt", "4x2", "auto"),
        ("llama", "2x4", "auto"),
        ("llama", "4x2", "auto"),
        ("llama", "2x2x4", "auto"),
        ("gpt", "2x4", "rs"),
    ],
)
def test_only_products_and_norm_statistics_communicate(model, mesh, dataflow):
    lowered = lowered_block(model, mesh, dataflow)
    found = collectives(operations(lowered.as_text()))
    kinds = collections.Counter(op.kind for op in found if any(len(group) > 1 for group in op.groups))
    # One product and its two gradients gather four times and scatter twice, each in S parts; with several copies of
    # the model it sums the gradient of its weight. A norm gathers statistics forward and backward and sums the
    # gradients of its scale and shift.
    assert kinds == {
        "all_gather": 4 * SLICES * PRODUCTS + 2 * NORMS,
        "reduce_scatter": 2 * SLICES * PRODUCTS,
        "all_reduce": (PRODUCTS if mesh == "2x2x4" else 0) + NORMS,
    }
    check_block(lowered)


def test_check_notices_a_layout_mistake():
    with pytest.raises(AssertionError, match="resharding|beyond"):
        check_block(lowered_block("gpt", "2x4", reshard=True))
