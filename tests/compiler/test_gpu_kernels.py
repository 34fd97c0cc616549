"""Launches, bytes and FLOPs of kernels in optimized HLO of XLA:GPU, against counts by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from mstrain.benchmarks.peers.task import Task
from mstrain.hardware import chip_named
from mstrain.models.config import ModelConfig
from mstrain.program.program import text_of
from tests.compiler.gpu_kernels import (
    ATTENTION,
    COPY,
    ELEMENTWISE,
    FILL,
    INDEXED,
    MATMUL,
    REDUCTION,
    read_kernels,
    totals,
)
from tests.compiler.gpu_step import compile_step, describe, main
from tests.compiler.gpu_target import absent_gpu, missing_compiler

# Three turns of a loop over layers: the weight of a layer is taken from a stack of three and multiplied, the product is
# written to its place in a stack of three. Shortened from a program of jaxlib 0.10.2.
PROGRAM = """HloModule step, is_scheduled=true

%take (p0: bf16[3,64,32], p1: s32[]) -> bf16[64,32] {
  %p0 = bf16[3,64,32]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = bf16[1,64,32]{2,1,0} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,64,32}
  ROOT %flat = bf16[64,32]{1,0} bitcast(%slice)
}

%multiply (q0: bf16[128,64], q1: bf16[64,32]) -> bf16[128,32] {
  %q0 = bf16[128,64]{1,0} parameter(0)
  %q1 = bf16[64,32]{1,0} parameter(1)
  ROOT %dot = bf16[128,32]{1,0} dot(%q0, %q1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%put (r0: bf16[3,128,32], r1: bf16[128,32], r2: s32[]) -> bf16[3,128,32] {
  %r0 = bf16[3,128,32]{2,1,0} parameter(0)
  %r1 = bf16[128,32]{1,0} parameter(1)
  %r2 = s32[] parameter(2)
  %none = s32[] constant(0)
  %one = bf16[1,128,32]{2,1,0} bitcast(%r1)
  ROOT %update = bf16[3,128,32]{2,1,0} dynamic-update-slice(%r0, %one, %r2, %none, %none)
}

%body (t: (s32[], bf16[128,64], bf16[3,64,32], bf16[3,128,32])) -> (s32[], bf16[128,64], bf16[3,64,32], bf16[3,128,32]) {
  %t = (s32[], bf16[128,64]{1,0}, bf16[3,64,32]{2,1,0}, bf16[3,128,32]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = bf16[128,64]{1,0} get-tuple-element(%t), index=1
  %w = bf16[3,64,32]{2,1,0} get-tuple-element(%t), index=2
  %ys = bf16[3,128,32]{2,1,0} get-tuple-element(%t), index=3
  %taken = bf16[64,32]{1,0} fusion(%w, %i), kind=kLoop, calls=%take
  %product = bf16[128,32]{1,0} fusion(%x, %taken), kind=kCustom, calls=%multiply
  %kept = bf16[3,128,32]{2,1,0} fusion(%ys, %product, %i), kind=kLoop, calls=%put
  ROOT %next = (s32[], bf16[128,64]{1,0}, bf16[3,64,32]{2,1,0}, bf16[3,128,32]{2,1,0}) tuple(%i, %x, %w, %kept)
}

%condition (u: (s32[], bf16[128,64], bf16[3,64,32], bf16[3,128,32])) -> pred[] {
  %u = (s32[], bf16[128,64]{1,0}, bf16[3,64,32]{2,1,0}, bf16[3,128,32]{2,1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

%clear () -> bf16[3,128,32] {
  %nought = bf16[] constant(0)
  ROOT %zeros = bf16[3,128,32]{2,1,0} broadcast(%nought), dimensions={}
}

%sum (s0: bf16[3,128,32]) -> (f32[32], bf16[3,128,32]) {
  %s0 = bf16[3,128,32]{2,1,0} parameter(0)
  %wide = f32[3,128,32]{2,1,0} convert(%s0)
  %start = f32[] constant(0)
  %sums = f32[32]{0} reduce(%wide, %start), dimensions={0,1}, to_apply=%add
  %minus = bf16[3,128,32]{2,1,0} negate(%s0)
  ROOT %both = (f32[32]{0}, bf16[3,128,32]{2,1,0}) tuple(%sums, %minus)
}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%exponential (e0: bf16[128,64]) -> bf16[128,64] {
  %e0 = bf16[128,64]{1,0} parameter(0)
  ROOT %e = bf16[128,64]{1,0} exponential(%e0)
}

%replace (u0: bf16[128,64], u1: s32[8,1], u2: bf16[8,64]) -> bf16[128,64] {
  %u0 = bf16[128,64]{1,0} parameter(0)
  %u1 = s32[8,1]{1,0} parameter(1)
  %u2 = bf16[8,64]{1,0} parameter(2)
  ROOT %rows = bf16[128,64]{1,0} scatter(%u0, %u1, %u2), update_window_dims={1}, to_apply=%add
}

ENTRY %main (x: bf16[128,64], w: bf16[3,64,32], q: bf16[2,256,4,64], p: s32[8,1], v: bf16[8,64]) -> f32[32] {
  %x.1 = bf16[128,64]{1,0} parameter(0)
  %w.1 = bf16[3,64,32]{2,1,0} parameter(1)
  %q.1 = bf16[2,256,4,64]{3,2,1,0} parameter(2)
  %places = s32[8,1]{1,0} parameter(3)
  %values = bf16[8,64]{1,0} parameter(4)
  %first = s32[] constant(0)
  %e.1 = bf16[128,64]{1,0} fusion(%x.1), kind=kLoop, calls=%exponential
  %empty = bf16[3,128,32]{2,1,0} fusion(), kind=kLoop, calls=%clear
  %state = (s32[], bf16[128,64]{1,0}, bf16[3,64,32]{2,1,0}, bf16[3,128,32]{2,1,0}) tuple(%first, %e.1, %w.1, %empty)
  %loop = (s32[], bf16[128,64]{1,0}, bf16[3,64,32]{2,1,0}, bf16[3,128,32]{2,1,0}) while(%state), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %stack = bf16[3,128,32]{2,1,0} get-tuple-element(%loop), index=3
  %scores = (bf16[2,256,4,64]{3,2,1,0}, u8[0]{0}) custom-call(%q.1, %q.1, %q.1), custom_call_target="__cudnn$fmhaSoftmax"
  %slopes = (bf16[2,256,4,64]{3,2,1,0}, u8[0]{0}) custom-call(%q.1, %q.1, %q.1), custom_call_target="__cudnn$fmhaSoftmaxBackward"
  %summed = (f32[32]{0}, bf16[3,128,32]{2,1,0}) fusion(%stack), kind=kInput, calls=%sum
  %replaced = bf16[128,64]{1,0} fusion(%x.1, %places, %values), kind=kInput, calls=%replace
  ROOT %result = f32[32]{0} get-tuple-element(%summed), index=0
}
"""  # noqa: E501
HEADS = 2 * 256 * 4 * 64 * 2  # bytes of the queries
SCORES = 2 * 4 * 256 * 256 / 2  # below the diagonal


@pytest.mark.parametrize(
    ("name", "kind", "launches", "moved", "flops"),
    [
        ("taken", COPY, 3, 2 * (64 * 32 * 2) + 4, 0),  # one layer of the stack, and the counter
        ("product", MATMUL, 3, 2 * (128 * 64 + 64 * 32 + 128 * 32), 2 * 128 * 64 * 32),
        ("kept", COPY, 3, 2 * (128 * 32 * 2) + 4, 0),  # in place: not the whole stack
        ("empty", FILL, 1, 3 * 128 * 32 * 2, 0),
        ("e.1", ELEMENTWISE, 1, 2 * 128 * 64 * 2, 0),
        ("summed", REDUCTION, 1, 2 * (3 * 128 * 32 * 2) + 32 * 4, 0),
        ("replaced", INDEXED, 1, 2 * (8 * 64 * 2) + 8 * 4, 0),
        ("scores", ATTENTION, 1, 4 * HEADS, 2 * 2 * SCORES * 64),
        ("slopes", ATTENTION, 1, 4 * HEADS, 5 * 2 * SCORES * 64),
    ],
)
def test_a_kernel_moves_and_computes_what_it_touches(name, kind, launches, moved, flops):
    found = next(kernel for kernel in read_kernels(PROGRAM) if kernel.name == name)
    assert (found.kind, found.launches, found.bytes, found.flops) == (kind, launches, moved, flops)


def test_a_class_takes_the_longer_of_bytes_and_flops_kernel_by_kernel():
    kernels = read_kernels(PROGRAM)
    assert sum(kernel.launches for kernel in kernels) == 3 * 3 + 6
    found = totals(kernels, peak=1e9, bandwidth=1e9)
    assert found[MATMUL].launches == 3 and found[MATMUL].seconds == pytest.approx(3 * 2 * 128 * 64 * 32 / 1e9)
    assert found[COPY].seconds == pytest.approx(found[COPY].bytes / 1e9)
    assert found[COPY].bytes == 3 * (4 * 64 * 32 + 4 * 128 * 32 + 8)


def test_a_loop_of_unknown_length_is_an_error():
    with pytest.raises(ValueError, match="trip count of the loop loop"):
        read_kernels(PROGRAM.replace("known_trip_count", "another"))


def test_the_floor_is_the_products_at_peak_and_then_the_update():
    """By hand: 6 FLOPs a parameter of a product and token, three times causal attention's, 28 bytes a parameter."""
    model = ModelConfig(name="one", layers=1, width=64, heads=2, vocab_size=256, context=128, bias="none")
    products = 12 * 64 * 64 + 64 * 256
    flops = 2 * 128 * (6 * products + 3 * 2 * 64 * 128)
    held = products + 128 * 64 + 3 * 2 * 64  # with positions, and three norms of scale and bias
    chip = dataclasses.replace(chip_named("h200"), peak_bf16=1e9, hbm_bandwidth=1e8)
    floor, most = describe(read_kernels(PROGRAM), chip, model, batch=2, seq=128)[-2:]
    assert floor.startswith(f"Lower bound of any step {1e3 * (flops / 1e9 + 28 * held / 1e8):.1f} ms") and "MFU" in most


@pytest.fixture(scope="module")
def h200():
    if problem := missing_compiler():
        pytest.skip(problem)
    return absent_gpu(chip_named("h200"))


def test_a_product_compiled_without_a_gpu_has_its_flops(h200):
    there = SingleDeviceSharding(h200)
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=there) for shape in ((256, 512), (512, 1024)))
    kernels = read_kernels(text_of(jax.jit(lambda x, w: jnp.tanh(x @ w)).lower(x, w).compile()))
    products = [kernel for kernel in kernels if kernel.kind == MATMUL]
    assert sum(kernel.flops for kernel in products) == 2 * 256 * 512 * 1024
    assert sum(kernel.bytes for kernel in products) >= 2 * (256 * 512 + 512 * 1024 + 256 * 1024)


@pytest.mark.parametrize("peer", ["mstrain", "flax"])
def test_a_step_compiled_without_a_gpu_attends_by_cudnn(h200, peer):
    model = ModelConfig(name="two", layers=2, width=128, heads=2, vocab_size=256, context=128)
    compiled = compile_step(Task(peer, model, 2, 128), h200, {})
    kernels = read_kernels(text_of(compiled))
    assert sum(kernel.launches for kernel in kernels if kernel.kind == ATTENTION) == 2 * 2
    scores = 0.5 * 2 * 2 * 128 * 128  # causal, of all sequences and heads
    attention = sum(kernel.flops * kernel.launches for kernel in kernels if kernel.kind == ATTENTION)
    assert attention == pytest.approx(2 * (2 + 5) * 2 * scores * 64)


def test_the_command_prints_classes_and_the_largest_kernels(h200, capsys, tmp_path):
    main("h200", ["models=tiny", "peers=mstrain", "batch=2", "seq=128", "top=3", f"dump={tmp_path}"])
    printed = capsys.readouterr().out
    assert "mstrain, tiny, 2 x 128, one h200: " in printed and f"| {MATMUL} | " in printed
    assert sum(" ms " in line and " GFLOPs " in line for line in printed.splitlines()) == 3
    assert read_kernels((tmp_path / "mstrain_tiny.hlo").read_text())


def test_other_gpus_are_refused(h200):
    with pytest.raises(ValueError, match="Type h100 or h200"):
        absent_gpu(chip_named("b200"))
