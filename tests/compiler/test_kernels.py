"""The cost of custom kernels, by the tiles that they visit and their busiest unit, against counts by hand."""

import dataclasses

import pytest

from mstrain.compiler import KernelRates, read_schedule
from mstrain.gemm.expert_exchange import ROUND
from tests.compiler.programs import MACHINE, module

SEQ, HEADS, WIDTH = 2048, 4, 128
SCORES = HEADS * SEQ * SEQ
PRODUCT = 2 * SCORES * WIDTH


def cycles_of(kernel, block=1024, width=WIDTH, on=MACHINE, causal=True):
    names = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_kv_compute")
    note = ", ".join(f'\\"{name}\\": {block if name != "block_kv_compute" else 512}' for name in names)
    attributes = f', frontend_attributes={{kernel_metadata={{\n"xprof_metadata":"{{{note}}}"\n}}}}' if block else ""
    shape = f"bf16[{HEADS},{SEQ},{width}]{{2,1,0}}"
    positions = f"s32[{SEQ},128]" if causal else f"s32[1,{SEQ},128]"
    operands = f"%m = {positions} parameter(1)\n" + "\n".join(
        f"%{name} = {shape} parameter({i})" for i, name in enumerate("qkv", 2)
    )
    call = f'custom-call(%m, %q, %k, %v), custom_call_target="tpu_custom_call"{attributes}'
    return read_schedule(module(f"{operands}\nROOT %{kernel} = {shape} {call}"), on).cycles["kernel"]


@pytest.mark.parametrize(("block", "share"), [(1024, 3 / 4), (512, 10 / 16), (128, 17 / 32), (2048, 1), (None, 1 / 2)])
def test_splash_attention_visits_whole_blocks(block, share):
    """Two by two blocks of 1024: the one above the diagonal is left out. Without blocks stated, half."""
    assert cycles_of("splash_mha_fwd_residuals.1", block) == pytest.approx(share * 2 * PRODUCT / 1e12 * 1e9)
    assert cycles_of("splash_mha_dkv_no_residuals.1", block) == pytest.approx(share * 5 * PRODUCT / 1e12 * 1e9)


def test_splash_attention_without_a_causal_mask_visits_every_score():
    assert cycles_of("splash_mha_fwd_residuals.1", causal=False) == pytest.approx(2 * PRODUCT / 1e12 * 1e9)


def test_a_head_narrower_than_the_matrix_unit_leaves_the_rest_idle():
    assert cycles_of("splash_mha_fwd.1", width=64) == pytest.approx(cycles_of("splash_mha_fwd.1"))
    wide = dataclasses.replace(MACHINE, kernels=dataclasses.replace(MACHINE.kernels, matrix_unit=256))
    assert cycles_of("splash_mha_fwd.1", on=wide) == pytest.approx(2 * cycles_of("splash_mha_fwd.1"))


@pytest.mark.parametrize(("kernel", "products", "operations"), [("fwd", 2, 8), ("dkv", 5, 9)])
@pytest.mark.parametrize(("overlap", "beside"), [(1.0, 0.0), (0.5, 0.5), (0.0, 1.0)])
def test_softmax_and_exponentials_count_on_the_vector_unit(overlap, beside, kernel, products, operations):
    """The busiest unit takes its whole time, the others run beside it in part; one exponential a score."""
    rates = KernelRates(flops=1e12, vector=10, exponentials=10, matrix_unit=128, overlap=overlap)
    visited = 3 / 4 * SCORES
    units = [3 / 4 * products * PRODUCT / 1e3, operations * visited / 10, visited / 10]
    found = cycles_of(f"splash_mha_{kernel}.1", on=dataclasses.replace(MACHINE, kernels=rates))
    assert found == pytest.approx(max(units) + beside * (sum(units) - max(units)))


def test_a_kernel_that_states_nothing_takes_as_long_as_its_bytes():
    assert cycles_of("my_kernel") == pytest.approx((4 * HEADS * SEQ * WIDTH * 2 + 4 * SEQ * 128) / 1e12 * 1e9)


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize(("rows", "scope"), [(8192, ""), (10240, ROUND + "/")])
def test_a_grouped_product_visits_a_tile_of_two_groups_twice(summed, rows, scope):
    """Megablox: 16 tiles of 512 rows, and 7 more for 8 groups. A quarter more rows of a round are empty."""
    M, K, N, groups = rows, 1024, 2048, 8
    a, b, weights = f"bf16[{M},{K}]{{1,0}}", f"bf16[{M},{N}]{{1,0}}", f"bf16[{groups},{K},{N}]{{2,1,0}}"
    name, other, result = ("tgmm", b, weights) if summed else ("gmm", weights, b)
    path = f"jit(s)/{scope}jit({name})/p"
    call = f'custom-call(%g, %a, %b), custom_call_target="tpu_custom_call", metadata={{op_name="{path}"}}'
    operands = f"%g = s32[23] parameter(1)\n%a = {a} parameter(2)\n%b = {other} parameter(3)"
    text = module(f"{operands}\nROOT %kernel.1 = {result} {call}")
    assert read_schedule(text, MACHINE).cycles["kernel"] == pytest.approx(2 * 23 * 512 * K * N / 1e12 * 1e9)


@pytest.mark.parametrize("custom", [False, True])
def test_a_gather_without_an_estimate_takes_as_long_as_the_rows_that_it_reads_and_writes(custom):
    table, rows = "bf16[4096,1024]{1,0}", "bf16[512,1024]{1,0}"
    gather = f"ROOT %gather.1 = {rows} gather(%x, %i), offset_dims={{1}}"
    operands = f"%x = {table} parameter(0)\n%i = s32[512] parameter(1)"
    lines = "\n".join(f"  {line}" for line in (*operands.splitlines(), gather))
    body = f"\n%body (x: {table}, i: s32[512]) -> {rows} {{\n{lines}\n}}\n"
    call = f"ROOT %gather_fusion.1 = {rows} fusion(%x, %i), kind=kCustom, calls=%body"
    text = module(f"{operands}\n{call}", body) if custom else module(f"{operands}\n{gather}")
    moved = 2 * (2 * 512 * 1024) + 4 * 512
    assert read_schedule(text, MACHINE).cycles["other"] == pytest.approx(moved / 1e12 * 1e9)
