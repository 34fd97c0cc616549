"""Weights, gradients and moments sharded over data-parallel replicas."""

import dataclasses
import functools
import math

import jax
import jax.extend
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from mstrain.data import Batch
from mstrain.gemm.copies import SHARED, sum_copies
from mstrain.mesh import make_mesh, parse_mesh
from mstrain.models.config import ModelConfig
from mstrain.models.parameters import parameter_shapes
from mstrain.models.plan import ParallelConfig, make_plan
from mstrain.models.transformer import Transformer
from mstrain.program.optimizer import OptimizerConfig, make_optimizer
from mstrain.program.rounding import GradientSums
from mstrain.program.step import abstract_state, gradients

MODEL = ModelConfig(layers=3, width=64, heads=4, mlp_dim=128, vocab_size=64, context=8)
OPTIMIZER = make_optimizer(OptimizerConfig(learning_rate=1e-3))


def module_on(mesh: str, shard: str, model: ModelConfig = MODEL, remat: str = "none") -> Transformer:
    plan = make_plan(ParallelConfig("collective"), model, make_mesh(parse_mesh(mesh)), 8, 8, shard=shard)
    return Transformer(model, plan, 8, jnp.bfloat16, remat)


def test_sharding_without_copies_is_refused_with_what_fits():
    with pytest.raises(ValueError, match="shard=gradients has no effect: .* Type shard=none, or .*data axis"):
        module_on("2x4", "gradients")


def test_nothing_is_fused_into_a_sum_of_shards():
    """libtpu does not compile a reduce_scatter with a cast behind it."""
    mesh, spec = make_mesh(parse_mesh("4x1x2")), P(SHARED)
    total = jax.shard_map(lambda x: sum_copies(x, spec), mesh=mesh, in_specs=P(), out_specs=spec, check_vma=False)
    text = str(jax.make_jaxpr(total)(jnp.zeros((8, 8))))
    assert text.index("reduce_scatter") < text.index("optimization_barrier")


ODD = dataclasses.replace(MODEL, width=66, heads=2, num_kv_heads=2, head_dim=33)


@pytest.mark.parametrize("model", [MODEL, ODD], ids=["divides", "odd"])
def test_every_copy_holds_its_share_of_weights_and_moments(model):
    """A tensor with a dim that divides over the copies is sharded over them; the others are replicated."""
    whole, shared = (abstract_state(module_on("4x1x2", shard, model), OPTIMIZER) for shard in ("none", "optimizer"))
    replicated = 0
    for before, after in zip(jax.tree.leaves(whole), jax.tree.leaves(shared), strict=True):
        parts = [x.sharding.shard_shape(x.shape) for x in (before, after)]
        divides = any(dim % 4 == 0 for dim in parts[0][before.ndim == 3 :])
        assert math.prod(parts[0]) == math.prod(parts[1]) * (4 if divides else 1)
        replicated += before.ndim > 0 and not divides
    assert (replicated > 0) == (model == ODD)


@functools.cache
def traced(remat: str):
    """The jaxpr of the gradients of a sharded module, and the shapes of its stacked parameters."""
    module = module_on("2x2x2", "parameters", remat=remat)
    params = parameter_shapes(module)
    batch = Batch(jax.ShapeDtypeStruct((1, 16, 9), jnp.int32))  # 128 tokens: no activation has the shape of a kernel
    jaxpr = jax.make_jaxpr(lambda params, batch: gradients(module, params, batch))(params, batch).jaxpr
    return jaxpr, [leaf.shape for leaf in jax.tree.leaves(params["blocks_0"])]


@pytest.mark.parametrize("remat", ["none", "full"])
def test_no_gathered_weight_is_saved_for_the_backward_pass(remat):
    """Gathered kernels are bfloat16, shards and gradients float32; a scan would return those that it saves."""
    jaxpr, shapes = traced(remat)
    kernels = {shape for shape in shapes if len(shape) == 3}
    saved = [(out.aval.shape, out.aval.dtype) for scan in scans(jaxpr) for out in scan.outvars]
    assert len(kernels) == 3 and kernels <= {shape for shape, _ in saved}  # their gradients
    assert not [shape for shape, dtype in saved if shape in kernels and dtype == jnp.bfloat16]


def test_gathers_and_sums_do_not_wait_for_the_layer_of_their_iteration():
    """Weights for the next iteration do not depend on activations, nor sums of gradients on gradients of activations:
    the first value in the carry of the scans over layers."""
    jaxpr, shapes = traced("full")
    kernels = [len(shape) == 3 for shape in shapes]
    forward, backward = (scan for scan in scans(jaxpr) if scan_sizes(scan)[1] > len(shapes))
    for scan in (forward, backward):
        body, (consts, carry) = scan.params["jaxpr"].jaxpr, scan_sizes(scan)
        after = depending(body, body.invars[consts])
        carried = [out in after for out in body.outvars[:carry]]
        activations, weights, rest = carried[0], carried[1 : 1 + len(shapes)], carried[1 + len(shapes) :]
        assert activations and not any(weights)
        if scan is backward:
            partial, sums = rest[: sum(kernels)], rest[sum(kernels) :]
            assert (
                all(partial) and [waits for waits, kernel in zip(sums, kernels, strict=True) if kernel] == [False] * 4
            )


def test_stages_gather_the_next_layer_and_sum_in_bf16():
    """In the scans over the layers of a stage, bfloat16 kernels of the next layer do not depend on activations; the
    scans over ticks carry the sums of gradients."""
    mesh, model = make_mesh(parse_mesh("data2-stage2-col2")), dataclasses.replace(MODEL, layers=4)
    plan = make_plan(ParallelConfig("collective"), model, mesh, 8, 8, shard="parameters")
    module = Transformer(model, plan, 8, jnp.bfloat16, "full")
    params, batch = parameter_shapes(module), Batch(jax.ShapeDtypeStruct((2, 16, 9), jnp.int32))
    jaxpr = jax.make_jaxpr(lambda *x: gradients(module, *x, GradientSums("nearest"), 0))(params, batch).jaxpr
    kernels = [leaf.shape[1:] for leaf in jax.tree.leaves(params["blocks_0"]) if len(leaf.shape) == 3]
    sums, passes = 0, 0
    for scan in scans(jaxpr):
        body, (consts, carry) = scan.params["jaxpr"].jaxpr, scan_sizes(scan)
        carried = list(zip(body.invars[consts:], body.outvars[:carry]))
        totals = [x.aval for x, _ in carried if x.aval.shape[:3] == (2, 1, 2) and x.aval.shape[3:] in kernels]
        assert {x.dtype for x in totals} <= {jnp.dtype(jnp.bfloat16)}
        sums += len(totals) == len(kernels)
        gathered = {y for x, y in carried if x.aval.shape[1:] in kernels and x.aval.dtype == jnp.bfloat16}
        activations = [x for x, _ in carried if x.aval.shape == (2, 128, 64)]  # of both stages
        if len(gathered) == len(kernels) and activations:
            passes += 1
            assert not gathered & depending(body, activations[0])
    assert sums and passes >= 2  # forward and backward


def scan_sizes(scan) -> tuple[int, int]:
    """(constants, carried values): what a scan slices or stacks has one dim more than in its body. The parameters that
    number them differ between releases of JAX."""
    body = scan.params["jaxpr"].jaxpr
    stacked = sum(x.aval.shape != y.aval.shape for x, y in zip(scan.outvars, body.outvars, strict=True))
    sliced = sum(x.aval.shape != y.aval.shape for x, y in zip(scan.invars, body.invars, strict=True))
    carry = len(body.outvars) - stacked
    return len(body.invars) - sliced - carry, carry


def depending(jaxpr, variable) -> set:
    """The variables of a jaxpr that depend on one of them."""
    found = {variable}
    for eqn in jaxpr.eqns:
        if any(isinstance(x, jax.extend.core.Var) and x in found for x in eqn.invars):
            found |= set(eqn.outvars)
    return found


def scans(jaxpr):
    """All scans in a jaxpr."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield eqn
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)  # of a closed jaxpr
            if hasattr(inner, "eqns"):
                yield from scans(inner)
