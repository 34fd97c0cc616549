"""MeshSlice compiled by the TPU compiler, with small sizes on 32 devices; skipped if libtpu is not installed."""

import dataclasses
import functools
import re

import jax.numpy as jnp
import optax
import pytest

from mstrain.compiler import (
    DoesNotFit,
    compile_program,
    make_target,
    predict,
)
from mstrain.compiler.machine import FLOPS_PER_CYCLE
from mstrain.gemm import Grid, Plan
from mstrain.models.config import ModelConfig
from mstrain.models.plan import ParallelConfig, make_plan
from mstrain.models.size import count_parameters
from mstrain.models.transformer import Transformer
from mstrain.program.parts import layer_program, product_program
from mstrain.program.step import step_program
from tests.compiler.study import compile_flow

pytestmark = pytest.mark.usefixtures("tpu_compiler")
SIZES = (16384, 4096, 16384)
SMALL_SIZES = (4096, 1024, 4096)  # most of the compile time is the search for tiles: fewer, and a smaller memory
QUICK = {"xla_tpu_scoped_vmem_limit_kib": 8192}
SMALL = ModelConfig(name="small", layers=3, width=512, heads=8, position="alibi", vocab_size=1024)

BLOCK = 12 * SMALL.width**2  # weights of one layer


@functools.cache
def target(name):
    return make_target(name, "4x8")


@pytest.mark.parametrize(("name", "flow"), [
    ("v5p-64", "os"), ("v5p-64", "ls"), ("v5p-64", "rs"), ("tpu7x:2x2x4", "ls"),
])  # fmt: skip
def test_all_but_the_first_and_last_transfer_hide(name, flow):
    schedule = predict(compile_flow("meshslice", flow, 4, target(name), SMALL_SIZES))
    assert len(schedule.transfers) == 2 * 4
    assert schedule.overlapped >= 2 * 4 - 2
    assert schedule.blocking == 0
    kinds = {t.collective.kind for t in schedule.transfers}
    assert kinds == ({"all-gather"} if flow == "os" else {"all-gather", "reduce-scatter"})


def test_only_what_a_device_keeps_changes_its_layout():
    """Four slices of GPT-3's first product are not multiples of tpu7x's matrix unit on 8 columns. Turning whole
    products before they are scattered would cost half as much as multiplying, and hide nothing.
    """
    schedule = predict(compile_flow("meshslice", "ls", 4, target("tpu7x:2x2x4"), (65536, 12288, 49152)))
    assert schedule.move_fraction < 0.1
    assert schedule.overlapped >= 2 * 4 - 2


def test_nothing_hides_without_the_options():
    schedule = predict(compile_flow("meshslice", "os", 4, target("v5p-64"), SMALL_SIZES, options={}))
    assert schedule.overlapped == 0
    assert schedule.blocking == 2 * 4


def test_a_product_with_both_gradients(tmp_path):
    plan = Plan("collective", "os", Grid(target("v5p-64").mesh, ("row",), ("col",)))
    product = product_program(plan, *SIZES, jnp.bfloat16, backward=True)
    program = compile_program(product, target("v5p-64"), dump=tmp_path, options={})
    schedule = predict(program)
    assert [t.collective.kind for t in schedule.transfers].count("reduce-scatter") == 2
    peak = target("v5p-64").tpu_slice.chip.peak_bf16
    ideal = 3 * 2 * SIZES[0] * SIZES[1] * SIZES[2] / 32 / peak
    assert ideal < schedule.seconds - schedule.exposed < 1.5 * ideal
    operands = SIZES[0] * SIZES[1] + SIZES[1] * SIZES[2] + SIZES[0] * SIZES[2]
    assert program.memory.arguments == pytest.approx(2 * operands / 32, rel=0.01)
    assert (tmp_path / "collective_os_16384x4096x16384_S_1.hlo").read_text() == program.text


def test_a_layer_compiles_with_its_gradients():
    plan = make_plan(ParallelConfig("collective"), SMALL, target("v5p-64").mesh, 32, 512)
    layer = layer_program(SMALL, plan.groups[0][0], 32 * 512, 512, jnp.bfloat16)
    schedule = predict(compile_program(layer, target("v5p-64"), options=QUICK))
    assert {"row", "col"} <= {axis for t in schedule.transfers for axis in t.collective.axes}
    assert schedule.cycles["gemm"] > 6 * BLOCK * 32 * 512 / 32 / FLOPS_PER_CYCLE["v5p"]


def test_the_training_step_costs_every_layer_and_gives_its_state_up():
    plan = make_plan(ParallelConfig("collective"), SMALL, target("v5p-64").mesh, 32, 512)
    module = Transformer(SMALL, plan, 512, jnp.bfloat16, "full")
    step = step_program(module, optax.adamw(1e-3), 32)
    schedule = predict(compile_program(step, target("v5p-64"), options=QUICK))
    recomputed = 8 * SMALL.layers * BLOCK * 32 * 512
    assert schedule.cycles["gemm"] > recomputed / 32 / FLOPS_PER_CYCLE["v5p"]
    state = 3 * 4 * count_parameters(SMALL) / 32
    assert state < schedule.memory.arguments < 1.2 * state
    assert schedule.memory.outputs < 0.1 * state


def test_what_does_not_fit_says_by_how_much():
    with pytest.raises(
        DoesNotFit, match=r"would need [\d.]+ GiB of the 31\.25 GiB that the compiler gives a program\. Type remat=full"
    ) as error:
        compile_flow("collective", "os", 1, target("v6e-32"), (2**21, 2**16, 2**16))
    operands = 2 * (2**21 * 2**16 * 2 + 2**32) / 32  # bf16, a device
    gathered = 2 * (2**21 * 2**16 / 4 + 2**32 / 8)
    assert error.value.needed == pytest.approx(operands + gathered, rel=0.01)


@pytest.mark.parametrize(
    "changed", [{}, {"gated": True, "activation": "silu", "norm": "rmsnorm", "num_kv_heads": 4}], ids=str
)
def test_the_gather_of_a_scheduling_group_runs_beside_its_product(changed):
    chip, model = target("tpu7x:2x2x4").tpu_slice.chip, dataclasses.replace(SMALL, **changed)
    plan = make_plan(ParallelConfig(slices="4"), model, target("tpu7x:2x2x4").mesh, 32, 512, chip)
    assert plan.groups[0][0].attention.out.scheduling
    layer = layer_program(model, plan.groups[0][0], 32 * 512, 512, jnp.bfloat16)
    text = compile_program(layer, target("tpu7x:2x2x4"), options=QUICK).text
    for group in "234":  # a gather starts, the product runs, the gather is done
        member = rf'%(all-gather|\S*fusion)\S* = .*_scheduling_group_id="{group}"'
        kinds = [found[1] for line in text.splitlines() if (found := re.search(member, line))]
        first, *products, last = kinds
        assert first == last == "all-gather"
        assert products and "all-gather" not in products
