"""Contention for HBM: of collectives that overlap with products, copies between memories, and fused products."""

import pytest

from mstrain.compiler import read_schedule
from mstrain.compiler.hlo import hbm_bytes_of_shape, parse
from mstrain.compiler.traffic import hbm_bytes
from tests.compiler.programs import COL, ROW, cycles, gather_done, gather_start, gemm, machine, module

US = 1e-6
X = "%x = bf16[64,64]{1,0} parameter(0)\n"
TILE = 64 * 64 * 2  # bytes of x, and of what a product here returns
HOP = 8.192 * US


def read(entry, *computations, hbm=1e12):
    return read_schedule(module(entry, *computations), machine(hbm_bandwidth=hbm))


def overlap(hbm):
    return read(
        f"""{X}
        {gather_start("s", "x", ROW)}
        {gemm("y", "x", 10_000)}
        ROOT {gather_done("d", "s")}""",
        hbm=hbm,
    )


def test_a_product_beside_a_collective_takes_as_long_as_the_bytes_of_both():
    """The product's two operands and its result, and what the gather receives, written and sent on: 5 tiles."""
    assert overlap(1e12).seconds == pytest.approx(10 * US)
    slow = overlap(4 * TILE / (10 * US))
    assert slow.seconds == pytest.approx(5 / 4 * 10 * US)
    assert slow.cycles["gemm"] == 10_000
    assert slow.cycles["memory"] == pytest.approx(2_500)


def test_a_copy_between_memories_runs_beside_a_product_and_who_needs_it_early_waits():
    def seconds(before):
        return read(
            f"""{X}
            %c = (bf16[64,64]{{1,0:T(8,128)S(1)}}, bf16[64,64]{{1,0}}, u32[]{{:S(2)}}) copy-start(%x)
            {before}
            %d = bf16[64,64]{{1,0:T(8,128)S(1)}} copy-done(%c)
            ROOT {gemm("y", "d", 1_000)}""",
            hbm=1e9,
        )

    early = seconds("")
    # The copy, then a product with operands on the chip, whose result is written to the HBM.
    assert early.seconds == pytest.approx((TILE + TILE) / 1e9)
    assert early.exposed == 0
    # A product of 3 tiles that takes as long as 3.5 leaves half of the copy undone.
    late = seconds(gemm("z", "x", int(3.5 * TILE)))
    assert late.seconds == pytest.approx((3.5 + 0.5 + 1) * TILE / 1e9)
    assert late.cycles["memory"] == pytest.approx(0.5 * TILE + TILE - 1_000)


def test_a_copied_slice_costs_its_own_bytes():
    schedule = read(
        """%w = bf16[96,64,64]{2,1,0} parameter(0)
        %c = ((bf16[96,64,64]{2,1,0}), bf16[1,64,64]{2,1,0:T(8,128)S(1)}, u32[]{:S(2)}) slice-start(%w)
        ROOT %d = bf16[1,64,64]{2,1,0:T(8,128)S(1)} slice-done(%c)""",
        hbm=1e9,
    )
    assert schedule.seconds == pytest.approx(TILE / 1e9)


def test_copies_in_a_loop_count_for_every_trip():
    body = f"""
%again (s: (s32[], bf16[64,64])) -> pred[] {{
  %limit = s32[]{{:T(128)}} constant(5)
}}

%body (x: bf16[64,64]) -> (s32[], bf16[64,64]) {{
  {X.strip()}
  %c = (bf16[64,64]{{1,0:T(8,128)S(1)}}, bf16[64,64]{{1,0}}, u32[]{{:S(2)}}) copy-start(%x)
  %d = bf16[64,64]{{1,0:T(8,128)S(1)}} copy-done(%c)
  %y = bf16[64,64]{{1,0:T(8,128)S(1)}} fusion(%d, %d), kind=kOutput, calls=%product, {cycles(1_000)}
}}
"""
    loop = "ROOT %w = (s32[], bf16[64,64]{1,0}) while(%x), condition=%again, body=%body"
    schedule = read(X + loop, body, hbm=1e9)
    assert schedule.seconds == pytest.approx(5 * (TILE / 1e9 + 1 * US))
    assert schedule.cycles["gemm"] == 5_000


FUSED = f"""
%both (p: bf16[64,64]) -> bf16[64,64] {{
  %p = bf16[64,64]{{1,0}} parameter(0)
  %c = bf16[64,64]{{1,0}} convolution(%p, %p), dim_labels=bf_io->bf
  ROOT %sum = bf16[64,64]{{1,0}} all-reduce(%c), replica_groups={COL}, to_apply=%add
}}
"""


@pytest.mark.parametrize(("microseconds", "whole"), [(5, 1.5 * 8.192), (20, 20)])
def test_a_product_fused_with_a_collective_keeps_both(microseconds, whole):
    fused = f"ROOT %f = bf16[64,64]{{1,0}} fusion(%x), calls=%both, {cycles(1000 * microseconds)}"
    schedule = read(X + fused, FUSED)
    (transfer,) = schedule.transfers
    assert transfer.collective.kind == "all-reduce"
    assert schedule.cycles["gemm"] == 1000 * microseconds
    assert schedule.seconds == pytest.approx(whole * US)


def test_hidden_is_the_share_of_the_collective_under_compute_and_overlapped_only_counts():
    schedule = read(f"""{X}
        {gather_start("s", "x", COL)}
        {gemm("y", "x")}
        ROOT {gather_done("d", "s")}""")
    assert schedule.overlapped == 1
    assert schedule.hidden == pytest.approx(10 * US / (3 * HOP))
    assert read(f"{X}ROOT {gemm('y', 'x')}").hidden is None


def test_an_update_in_place_reads_and_writes_its_part():
    update = "ROOT %u = bf16[64,64]{1,0} dynamic-update-slice(%x, %p, %p, %p)"
    parsed = parse(module(f"{X}%p = bf16[8,64]{{1,0}} parameter(1)\n{update}"))
    assert hbm_bytes(parsed, parsed.entry, parsed.find(parsed.entry, "u")) == 2 * 8 * 64 * 2


def test_memory_on_the_chip_is_not_the_hbm():
    assert hbm_bytes_of_shape("(bf16[8,8]{1,0:T(8,128)(2,1)S(1)}, bf16[8,8]{1,0:T(8,128)(2,1)}, u32[]{:S(2)})") == 128


SLICED = """
%cut (w: bf16[96,64,64], i: s32[]) -> bf16[1,64,64] {
  %w = bf16[96,64,64]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %s = bf16[1,64,64]{2,1,0} dynamic-slice(%w, %i), dynamic_slice_sizes={1,64,64}
}

%layer (w: bf16[96,64,64], x: bf16[64,64], i: s32[]) -> bf16[64,64] {
  %w = bf16[96,64,64]{2,1,0} parameter(0)
  %i = s32[] parameter(2)
  %x = bf16[64,64]{1,0} parameter(1)
  %s = bf16[64,64]{1,0} fusion(%w, %i), kind=kLoop, calls=%cut
  ROOT %c = bf16[64,64]{1,0} convolution(%x, %s), dim_labels=bf_io->bf
}

%save (all: bf16[96,64,64], new: bf16[1,64,64], i: s32[]) -> bf16[96,64,64] {
  %all = bf16[96,64,64]{2,1,0} parameter(0)
  %new = bf16[1,64,64]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %u = bf16[96,64,64]{2,1,0} dynamic-update-slice(%all, %new, %i)
}
"""


@pytest.mark.parametrize(("fusion", "tiles"), [
    ("bf16[64,64]{1,0} fusion(%w, %x, %i), calls=%layer", 3),
    ("bf16[96,64,64]{2,1,0} fusion(%w, %n, %i), calls=%save", 2),
])  # fmt: skip
def test_a_layer_s_part_of_stacked_weights_is_all_that_is_read_or_written(fusion, tiles):
    entry = f"""{X}%w = bf16[96,64,64]{{2,1,0}} parameter(1)
        %n = bf16[1,64,64]{{2,1,0}} parameter(2)
        %i = s32[]{{:S(6)}} parameter(3)
        ROOT %f = {fusion}"""
    found = parse(module(entry, SLICED))
    assert hbm_bytes(found, "main", found.find("main", "f")) == tiles * TILE
