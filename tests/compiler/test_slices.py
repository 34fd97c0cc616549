"""Training steps over two TPU slices as the TPU compiler writes them; skipped where libtpu is missing."""

import math
import re

import jax.numpy as jnp
import optax
import pytest

from mstrain.compiler import compile_program, make_target
from mstrain.hardware import compiler_options
from mstrain.models.config import ModelConfig
from mstrain.models.plan import ParallelConfig, make_plan
from mstrain.models.size import count_parameters
from mstrain.models.transformer import Transformer
from mstrain.program.step import step_program

MODEL = ModelConfig(layers=1, width=256, heads=4, position="alibi", vocab_size=256)
QUICK = {"xla_tpu_scoped_vmem_limit_kib": 8192}


@pytest.mark.usefixtures("tpu_compiler")
def test_slices_send_each_other_shards_of_gradients():
    """A device sends its shard of the gradients, summed within its slice, over the data-center network."""
    target = make_target("2xv5p-16", "replica2-data4-row1-col2")
    mesh = target.mesh
    assert [{d.slice_index for d in part.flat} for part in mesh.devices] == [{0}, {1}]
    plan = make_plan(ParallelConfig("megatron"), MODEL, mesh, 16, 128, shard="optimizer")
    step = step_program(Transformer(MODEL, plan, 128, jnp.bfloat16), optax.adamw(1e-3), 16)
    options = compiler_options(target.tpu_slice.chip) | QUICK
    text = compile_program(step, target, options).text
    sent = [math.prod(map(int, dims.split(","))) for dims in re.findall(r"= \(f32\[([\d,]+)\]\S* .*? send\(", text)]
    parameters = count_parameters(MODEL)
    assert parameters / mesh.devices[0].size < sum(sent) < 1.3 * parameters / mesh.devices[0].size
