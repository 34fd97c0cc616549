"""The scan of shard=parameters as the TPU compiler schedules it; skipped where libtpu is missing."""

import jax.numpy as jnp
import optax
import pytest

from mstrain.compiler import compile_program, make_target, predict
from mstrain.hardware import compiler_options
from mstrain.models.config import ModelConfig
from mstrain.models.plan import ParallelConfig, make_plan
from mstrain.models.transformer import Transformer
from mstrain.program.step import step_program

MODEL = ModelConfig(layers=3, width=512, heads=8, position="alibi", vocab_size=128)
SMALLEST = 512 * 512 * 2 / 32  # bytes of a gathered kernel that a device holds; only kernels have as many
QUICK = {"xla_tpu_scoped_vmem_limit_kib": 8192}  # most of the compile time is the search for tiles


@pytest.mark.usefixtures("tpu_compiler")
def test_no_gather_or_sum_of_weights_blocks():
    target = make_target("v5p-64", "data4-row1-col8")
    plan = make_plan(ParallelConfig("megatron"), MODEL, target.mesh, 32, 128, shard="parameters")
    module = Transformer(MODEL, plan, 128, jnp.bfloat16, "full")
    options = compiler_options(target.tpu_slice.chip) | QUICK
    schedule = predict(compile_program(step_program(module, optax.adamw(1e-3), 32), target, options))
    weights = [t for t in schedule.transfers if t.collective.axes == ("data",) and t.collective.bytes >= SMALLEST]
    kinds = [t.collective.kind for t in weights]
    assert kinds.count("all-gather") == 4 * (2 * MODEL.layers + 1)  # the first layer's, and one ahead in each iteration
    assert kinds.count("reduce-scatter") == 4 * (MODEL.layers + 1)  # one behind in each iteration, and the last
    assert all(t.asynchronous for t in weights)
