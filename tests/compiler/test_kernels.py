"""Custom kernels cost what they visit, on the unit that is busiest, against counts by hand."""

import dataclasses

import pytest

from mstrain.compiler import KernelRates, read_schedule
from tests.compiler.programs import MACHINE, module

SEQ, HEADS, WIDTH = 2048, 4, 128
SCORES = HEADS * SEQ * SEQ
PRODUCT = 2 * SCORES * WIDTH


def cycles_of(kernel, block=1024, width=WIDTH, on=MACHINE):
    names = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_kv_compute")
    note = ", ".join(f'\\"{name}\\": {block if name != "block_kv_compute" else 512}' for name in names)
    attributes = f', frontend_attributes={{kernel_metadata={{\n"xprof_metadata":"{{{note}}}"\n}}}}' if block else ""
    shape = f"bf16[{HEADS},{SEQ},{width}]{{2,1,0}}"
    operands = "%m = s8[1,2,2]{2,1,0} parameter(1)\n" + "\n".join(
        f"%{name} = {shape} parameter({i})" for i, name in enumerate("qkv", 2)
    )
    call = f'custom-call(%m, %q, %k, %v), custom_call_target="tpu_custom_call"{attributes}'
    return read_schedule(module(f"{operands}\nROOT %{kernel} = {shape} {call}"), on).cycles["kernel"]


@pytest.mark.parametrize(("block", "share"), [(1024, 3 / 4), (512, 10 / 16), (128, 17 / 32), (2048, 1), (None, 1 / 2)])
def test_splash_attention_visits_whole_blocks(block, share):
    """Two by two blocks of 1024: the one above the diagonal is left out. Without blocks stated, half."""
    assert cycles_of("splash_mha_fwd_residuals.1", block) == pytest.approx(share * 2 * PRODUCT / 1e12 * 1e9)
    assert cycles_of("splash_mha_dkv_no_residuals.1", block) == pytest.approx(share * 5 * PRODUCT / 1e12 * 1e9)


def test_a_head_narrower_than_the_matrix_unit_leaves_the_rest_idle():
    assert cycles_of("splash_mha_fwd.1", width=64) == pytest.approx(cycles_of("splash_mha_fwd.1"))
    wide = dataclasses.replace(MACHINE, kernels=dataclasses.replace(MACHINE.kernels, matrix_unit=256))
    assert cycles_of("splash_mha_fwd.1", on=wide) == pytest.approx(2 * cycles_of("splash_mha_fwd.1"))


@pytest.mark.parametrize(("overlap", "beside"), [(1.0, 0.0), (0.5, 0.5), (0.0, 1.0)])
def test_softmax_and_exponentials_count_on_the_vector_unit(overlap, beside):
    """Here 8 operations a score take longest; the matrix unit and one exponential a score run beside them in part."""
    rates = KernelRates(vector=10, exponentials=10, matrix_unit=128, overlap=overlap)
    visited = 3 / 4 * SCORES
    matrix, vector, exponentials = 3 / 4 * 2 * PRODUCT / 1e3, 8 * visited / 10, visited / 10
    assert vector > matrix
    found = cycles_of("splash_mha_fwd.1", on=dataclasses.replace(MACHINE, kernels=rates))
    assert found == pytest.approx(vector + beside * (matrix + exponentials))


def test_a_kernel_that_states_nothing_takes_as_long_as_its_bytes():
    assert cycles_of("my_kernel") == pytest.approx((4 * HEADS * SEQ * WIDTH * 2 + 4) / 1e12 * 1e9)
