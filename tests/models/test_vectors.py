"""Scales and biases of scanned layers, whose gradients are summed over tokens once per step."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mstrain.data import Batch
from mstrain.mesh import make_mesh, parse_mesh
from mstrain.models.config import ModelConfig
from mstrain.models.parameters import init_parameters
from mstrain.models.plan import ParallelConfig, make_plan
from mstrain.models.stages import PipelineConfig
from mstrain.models.transformer import Transformer
from mstrain.models.vectors import repeat_vectors
from mstrain.program.optimizer import OptimizerConfig, make_optimizer
from mstrain.program.step import abstract_state, gradients
from tests.quick import QUICK

MODEL = ModelConfig(
    layers=3, width=64, heads=8, mlp_dim=128, vocab_size=64, context=8, bias="all", norm="layernorm", norm_bias=True,
    qk_norm=True, attention_sinks=True,
)  # fmt: skip
OPTIMIZER = make_optimizer(OptimizerConfig())
VECTORS = ("bias", "scale", "q_scale", "k_scale", "sinks")


def module_on(mesh: str, shard: str, algorithm: str, schedule: str | None = None) -> Transformer:
    devices, pipeline = make_mesh(parse_mesh(mesh)), PipelineConfig(schedule)
    plan = make_plan(ParallelConfig(algorithm), MODEL, devices, 8, 8, shard=shard, pipeline=pipeline)
    return Transformer(MODEL, plan, 8)


@pytest.mark.parametrize(
    "mesh, shard, algorithm, schedule",
    [
        ("2x2x2", "parameters", "collective", None),
        ("2x4", "none", "megatron", None),
        ("stage2-row2-col2", "none", "collective", "zero-bubble"),
    ],
)
def test_no_loop_over_layers_communicates_a_vector_or_its_gradient(mesh, shard, algorithm, schedule):
    module, microbatches = module_on(mesh, shard, algorithm, schedule), 2 if schedule else 1
    tokens = jax.ShapeDtypeStruct((microbatches, 8, 9), jnp.int32)
    params, batch = abstract_state(module, OPTIMIZER)["params"], Batch(tokens)
    program = jax.jit(lambda params, batch: gradients(module, params, batch)).lower(params, batch)
    text = program.compile(compiler_options=QUICK).as_text()
    loops = set(re.findall(r"while\(.*body=%?([\w.-]+)", text))
    bodies = [part for part in re.split(r"\n\n", text) if part.strip().lstrip("%").split(" ")[0] in loops]
    assert len(bodies) >= 2, "forward and backward scan"
    for body in bodies:
        for line in re.findall(r"= (.*? (?:all-reduce|all-gather|collective-permute|all-to-all)(?:-start)?\(.*)", body):
            if "replica_groups={{0}," in line:  # groups of one device send nothing
                continue
            for dims in re.findall(r"f32\[([\d,]+)\]", line.split("(%")[0]):
                sizes = [int(dim) for dim in dims.split(",")]
                assert sizes[-1] == 1 or math.prod(sizes) > 2 * MODEL.mlp_dim, f"a vector is communicated: {line}"


def test_rows_of_vectors_are_those_of_parameters_and_their_sum_is_the_transpose():
    module = module_on("2x2x2", "none", "collective")
    params = init_parameters(module, 0)
    repeated = jax.jit(lambda params: repeat_vectors(module, params))(params)
    random = jax.tree.map(lambda x: jax.random.normal(jax.random.key(1), x.shape), repeated)
    transposed = jax.linear_transpose(lambda params: repeat_vectors(module, params), params)(random)[0]
    for x, total in zip(jax.tree.leaves(random), jax.tree.leaves(transposed), strict=True):
        np.testing.assert_allclose(total, x if x.ndim == total.ndim else x.sum(axis=1), atol=1e-6)
    found = 0
    for path, x in jax.tree_util.tree_leaves_with_path(repeated["blocks_0"]):
        if path[-1].key in VECTORS:
            found += 1
            assert x.shape[1] in (4, 8) and x.ndim == 3  # rows of tokens, or of tokens and heads
            assert x.addressable_shards[0].data.shape[1] == 1
    assert found == 2 * 2 + 4 + 3
