"""Schedules written by hand, whose times are known by hand. Nothing is compiled."""

import dataclasses
import json

import numpy as np
import pytest

from mstrain.compiler import read_schedule
from mstrain.hardware import Link
from mstrain.timeline import write_perfetto
from tests.compiler.programs import COL, MACHINE, ROW, cycles, gather_done, gather_start, gemm, module

US = 1e-6
HOP = 8.192 * US  # 64 x 64 bf16 over one link


def read(entry, *computations):
    return read_schedule(module(entry, *computations), MACHINE)


X = "%x = bf16[64,64]{1,0} parameter(0)\n"


def test_a_blocking_collective_stalls_for_every_step_of_its_ring():
    schedule = read(f"""{X}
        %g = bf16[256,64]{{1,0}} all-gather(%x), replica_groups={COL}, dimensions={{0}}
        ROOT {gemm("y", "g")}""")
    assert schedule.seconds == pytest.approx(3 * HOP + 10 * US)
    assert schedule.exposed == pytest.approx(3 * HOP)
    assert (schedule.overlapped, schedule.blocking) == (0, 1)
    assert schedule.transfers[0].collective.axes == ("col",)


def test_slices_sum_over_their_network_beside_compute():
    """Of 8192 bytes over 1 byte/us a device sends half to the other slice, twice; each message has a hop of 10 us."""
    name = '_xla_megascale_transfer_type="ALL_REDUCE",_xla_host_transfer_rendezvous="sum"'
    to_host = f'is_host_transfer=true, frontend_attributes={{_xla_handler="xla_megascale_runtime",{name}}}'
    text = module(f"""{X}
        %t = token[] after-all()
        %s = (bf16[64,64]{{1,0}}, u32[], token[]) send(%x, %t), {to_host}
        %r = (bf16[64,64]{{1,0}}, u32[], token[]) recv(%t), {to_host}
        {gemm("y", "x")}
        %d = (bf16[64,64]{{1,0}}, token[]) recv-done(%r), is_host_transfer=true
        %v = bf16[64,64]{{1,0}} get-tuple-element(%d), index=0
        ROOT {gemm("z", "v")}""")
    torus = dataclasses.replace(MACHINE.torus, network=Link(0.0, 10 * US, 1e9))
    schedule = read_schedule(text, dataclasses.replace(MACHINE, axes={"replica": 2, **MACHINE.axes}, torus=torus))
    (transfer,) = schedule.transfers
    assert transfer.collective.axes == ("replica",) and transfer.collective.bytes == 4096
    assert schedule.exposed == pytest.approx(2 * (10 + 4.096) * US - 10 * US)


def test_a_collective_behind_a_product_costs_nothing():
    schedule = read(f"""{X}
        {gather_start("s", "x", ROW)}
        {gemm("y", "x")}
        {gather_done("d", "s")}
        ROOT {gemm("z", "d")}""")
    assert schedule.seconds == pytest.approx(20 * US)
    assert schedule.exposed == pytest.approx(0)
    assert (schedule.overlapped, schedule.blocking) == (1, 0)


def test_the_part_that_outlasts_the_product_is_exposed():
    schedule = read(f"""{X}
        {gather_start("s", "x", COL)}
        {gemm("y", "x")}
        {gather_done("d", "s")}
        ROOT {gemm("z", "d")}""")
    assert schedule.exposed == pytest.approx(3 * HOP - 10 * US)
    assert schedule.overlapped == 1


def test_a_copy_between_start_and_done_is_no_overlap():
    schedule = read(f"""{X}
        {gather_start("s", "x", ROW)}
        %c = bf16[64,64]{{0,1}} copy(%x), {cycles(5_000)}
        {gather_done("d", "s")}
        ROOT {gemm("z", "d")}""")
    assert schedule.overlapped == 0
    assert schedule.exposed == pytest.approx(HOP - 5 * US)
    assert schedule.cycles == {"gemm": 10_000, "kernel": 0, "move": 5_000, "other": 0, "memory": 0}
    assert schedule.move_fraction == 0.5


def test_one_axis_carries_one_collective_at_a_time_and_two_axes_carry_two():
    def pair(first, second):
        return read(f"""{X}
            {gather_start("s1", "x", first)}
            {gather_start("s2", "x", second)}
            {gather_done("d1", "s1")}
            ROOT {gather_done("d2", "s2")}""").seconds

    assert pair(ROW, ROW) == pytest.approx(2 * HOP)
    assert pair(ROW, COL) == pytest.approx(3 * HOP)


SPARSE = f"""
%on_sparse_core (p: bf16[64,64], t: token[]) -> bf16[32,64] {{
  %t = token[] parameter(1)
  %p = bf16[64,64]{{1,0:T(8,128)(2,1)}} parameter(0)
  ROOT %rs = bf16[32,64]{{1,0}} reduce-scatter(%p), replica_groups={ROW}, dimensions={{0}}, to_apply=%add
}}, execution_thread="sparsecore"
"""


def sparse_start(name, operand, called="on_sparse_core", core=0):
    shape = "((bf16[64,64]{1,0}, token[]), bf16[32,64]{1,0})"
    thread = f'async_execution_thread="sparsecore", to_apply=%{called}'
    config = f'backend_config={{"sparse_core_config":{{"offload":"OFFLOAD_COLLECTIVE","core_ids":["{core}"]}}}}'
    return f"%{name} = {shape} call-start(%{operand}, %t), {thread}, {config}"


def test_a_sparse_core_call_is_the_collective_it_calls():
    schedule = read(
        f"""{X}
        %p = s32[]{{:S(2)}} custom-call(), custom_call_target="PrepareAsyncCallStart"
        {sparse_start("s", "x")}
        {gemm("y", "x")}
        ROOT %d = bf16[32,64]{{1,0}} call-done(%s)""",
        SPARSE,
    )
    (transfer,) = schedule.transfers
    assert transfer.collective.kind == "reduce-scatter"
    assert transfer.collective.bytes == 64 * 64 * 2 / 2
    assert transfer.asynchronous and transfer.overlapped
    assert schedule.seconds == pytest.approx(10 * US)


@pytest.mark.parametrize("core, in_order, seconds", [(0, True, 0.5 + 0.75), (1, True, 0.75), (0, False, 0.75)])
def test_a_sparse_core_in_order_runs_one_collective_at_a_time(core, in_order, seconds):
    """Half a HOP for two rows, three quarters for four columns: on links of their own, but perhaps on one core."""
    over_columns = SPARSE.replace("on_sparse_core", "over_columns").replace(ROW, COL).replace("[32,64]", "[16,64]")
    text = module(
        f"""{X}
        {sparse_start("s", "x")}
        {sparse_start("u", "x", "over_columns", core)}
        %d = bf16[32,64]{{1,0}} call-done(%s)
        ROOT %e = bf16[16,64]{{1,0}} call-done(%u)""",
        SPARSE,
        over_columns,
    )
    schedule = read_schedule(text, dataclasses.replace(MACHINE, in_order=in_order))
    assert schedule.seconds == pytest.approx(seconds * HOP)


def test_a_transfer_begins_with_the_update_that_hands_it_its_operand():
    entry = f"""{X}
        %s = ((), bf16[32,64]{{1,0}}) call-start(%t), async_execution_thread="sparsecore", to_apply=%on_sparse_core
        {gemm("y", "x")}
        %u = ((bf16[64,64]{{1,0}}, token[]), bf16[32,64]{{1,0}}) call-update(%s, %y)
        %BETWEEN
        ROOT %d = bf16[32,64]{{1,0}} call-done(%u)"""
    late = read(entry.replace("%BETWEEN", ""), SPARSE)
    assert late.overlapped == 0
    assert late.seconds == pytest.approx(10 * US + HOP / 2)
    assert read(entry.replace("%BETWEEN", gemm("z", "x")), SPARSE).overlapped == 1


CONTINUED = f"""
%starts (p: bf16[64,64]) -> (bf16[64,64], bf16[128,64], u32[]) {{
  %p = bf16[64,64]{{1,0}} parameter(0)
  %ag = bf16[128,64]{{1,0}} all-gather(%p), replica_groups={ROW}, dimensions={{0}}
  ROOT %r = (bf16[64,64]{{1,0}}, bf16[128,64]{{1,0}}, u32[]) custom-call(%ag), custom_call_target="AsyncCollectiveStart"
}}

%async_collective_fusion.1 (p.1: bf16[64,64], q: bf16[64,64]) -> (bf16[64,64], bf16[128,64]) {{
  %p.1 = bf16[64,64]{{1,0}} parameter(0)
  %q = bf16[64,64]{{1,0}} parameter(1)
  %ag.1 = bf16[128,64]{{1,0}} all-gather(%p.1), replica_groups={ROW}, dimensions={{0}}
  %c = bf16[64,64]{{1,0}} convolution(%q, %q), dim_labels=bf_io->bf
  ROOT %r.1 = (bf16[64,64]{{1,0}}, bf16[128,64]{{1,0}}) tuple(%c, %ag.1)
}}
"""


def test_a_gather_carried_on_inside_a_product_is_one_overlapped_transfer():
    schedule = read(
        f"""{X}
      %async-collective-start = (bf16[64,64]{{1,0}}, bf16[128,64]{{1,0}}, u32[]) fusion(%x), kind=kCustom, calls=%starts
      %g0 = bf16[64,64]{{1,0}} get-tuple-element(%async-collective-start), index=0
      %f = (bf16[64,64]{{1,0}}, bf16[128,64]{{1,0}}) fusion(%g0, %x), calls=%async_collective_fusion.1, {cycles(9000)}
      %g1 = bf16[128,64]{{1,0}} get-tuple-element(%f), index=1
      ROOT %async-collective-done = bf16[128,64]{{1,0}} fusion(%g1), kind=kCustom, calls=%starts""",
        CONTINUED,
    )
    assert len(schedule.transfers) == schedule.overlapped == 1
    assert schedule.seconds == pytest.approx(9 * US)


def loop(body, trips="constant(3)"):
    return f"""
%again (s: (s32[], bf16[64,64])) -> pred[] {{
  %limit = s32[]{{:T(128)}} {trips}
  %s = (s32[], bf16[64,64]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}}

%body (x: bf16[64,64]) -> (s32[], bf16[64,64]) {{
  {X.strip()}
{body}
}}
"""


WHILE = "ROOT %w = (s32[], bf16[64,64]{1,0}) while(%x), condition=%again, body=%body"


def test_a_loop_counts_for_every_trip():
    inner = f"  %g = bf16[128,64]{{1,0}} all-gather(%x), replica_groups={ROW}, dimensions={{0}}\n  {gemm('y', 'g')}"
    schedule = read(X + WHILE, loop(inner))
    assert schedule.seconds == pytest.approx(3 * (HOP + 10 * US))
    assert schedule.exposed == pytest.approx(3 * HOP)
    assert len(schedule.transfers) == 3
    assert schedule.cycles["gemm"] == 30_000


def test_a_branch_of_some_ticks_counts_in_these():
    """Tick 1 of 3 takes it, which a name in the program tells; without the name all do."""
    branches = f"""
%short (x: bf16[64,64]) -> bf16[64,64] {{
  {X.strip()}
  ROOT %c = bf16[64,64]{{0,1}} copy(%x), {cycles(1_000)}
}}

%long (x: bf16[64,64]) -> bf16[64,64] {{
  {X.strip()}
  {gemm("y", "x")}
}}
"""
    inner = "  %p = bf16[64,64]{1,0} conditional(%t, %x, %x), branch_computations={%short, %long}"
    named = inner + ', metadata={op_name="jit(step)/while/body/in_ticks_010/cond"}'
    assert read(X + WHILE, branches + loop(inner)).seconds == pytest.approx(30 * US)
    assert read(X + WHILE, branches + loop(named)).seconds == pytest.approx(12 * US)


def test_the_compiler_s_own_trip_count_goes_first():
    known = WHILE + ', backend_config={"known_trip_count":{"n":"7"}}'
    assert read(X + known, loop("  " + gemm("y", "x"))).seconds == pytest.approx(70 * US)


def test_a_loop_without_transfers_is_one_event_of_each_kind():
    body = f"  {gemm('y', 'x')}\n  %c = bf16[64,64]{{0,1}} copy(%y), {cycles(1_000)}"
    schedule = read(X + WHILE, loop(body, "constant(5000)"))
    assert schedule.timeline.num_events == 2
    assert schedule.seconds == pytest.approx(5000 * 11 * US)


def test_a_loop_that_cannot_be_counted_is_refused():
    with pytest.raises(ValueError, match="trip count"):
        read(X + WHILE, loop("  " + gemm("y", "x"), "parameter(1)"))
    of_data = "parameter(1)\n  %device = u32[]{:T(128)} constant(0)"  # that has the element which ends the loop
    with pytest.raises(ValueError, match="trip count"):
        read(X + WHILE, loop("  " + gemm("y", "x"), of_data))


FUSIONS = f"""
%sum_and_keep (p: bf16[64,64], at: s32[]) -> bf16[32,64] {{
  %p = bf16[64,64]{{1,0}} parameter(0)
  %at = s32[] parameter(1)
  %two = s32[] constant(2)
  %begin = s32[] multiply(%at, %two)
  %sum = bf16[64,64]{{1,0}} all-reduce(%p), replica_groups={ROW}, to_apply=%add
  ROOT %part = bf16[32,64]{{1,0}} dynamic-slice(%sum, %begin), dynamic_slice_sizes={{32,64}}
}}

%join (p: bf16[32,64], q: bf16[32,64]) -> bf16[64,64] {{
  %p = bf16[32,64]{{1,0}} parameter(0)
  %q = bf16[32,64]{{1,0}} parameter(1)
  %low = bf16[] constant(-inf)
  %pp = bf16[64,64]{{1,0}} pad(%p, %low), padding=0_32x0_0
  %qq = bf16[64,64]{{1,0}} pad(%q, %low), padding=32_0x0_0
  ROOT %m = bf16[64,64]{{1,0}} maximum(%pp, %qq)
}}

%scale_and_cut (p: bf16[64,64]) -> bf16[32,64] {{
  %p = bf16[64,64]{{1,0}} parameter(0)
  %q = bf16[64,64]{{1,0}} multiply(%p, %p)
  ROOT %r = bf16[32,64]{{1,0}} slice(%q), slice={{[0:32], [0:64]}}
}}
"""


@pytest.mark.parametrize(("computation", "kind"), [("join", "move"), ("scale_and_cut", "other"), ("product", "gemm")])
def test_fusions_are_known_by_what_they_contain(computation, kind):
    entry = f"ROOT %f = bf16[64,64]{{1,0}} fusion(%x, %x), kind=kLoop, calls=%{computation}, {cycles(700)}"
    assert {k for k, v in read(X + entry, FUSIONS).cycles.items() if v} == {kind}


def test_a_fused_sum_that_keeps_its_part_is_a_blocking_reduce_scatter():
    entry = "ROOT %f = bf16[32,64]{1,0} fusion(%x, %x), kind=kCustom, calls=%sum_and_keep"
    (transfer,) = read(X + entry, FUSIONS).transfers
    assert transfer.collective.kind == "reduce-scatter" and not transfer.asynchronous
    assert transfer.end - transfer.begin == pytest.approx(HOP / 2)


def test_an_unfused_all_reduce_scatters_and_gathers():
    entry = f"ROOT %f = bf16[64,64]{{1,0}} all-reduce(%x), replica_groups={COL}, to_apply=%add"
    assert read(X + entry).seconds == pytest.approx(2 * 3 * HOP / 4)


@pytest.mark.parametrize(
    ("call", "sent", "passes"),
    [("all-reduce(%x), to_apply=%add", 1 / 4, 2), ("all-to-all(%x)", 1 / 4, 1), ("all-gather(%x)", 1, 1)],
)
def test_the_bytes_of_a_collective_on_links_and_hbm(call, sent, passes):
    """Of 8192 bytes in a group of 4. Received bytes are written and read to be sent on; a sum also reads its own."""
    (transfer,) = read(f"{X} ROOT %f = bf16[64,64]{{1,0}} {call}, replica_groups={COL}").transfers
    collective, bytes = transfer.collective, 8192 * sent
    assert collective.bytes == bytes
    assert collective.seconds == pytest.approx(passes * 3 * HOP * sent)
    assert collective.hbm_bytes == pytest.approx((2 + 3 * (passes - 1)) * 3 * bytes)


def test_a_custom_kernel_takes_the_longer_of_its_flops_and_bytes():
    def seconds(flops, moved):
        cost = f'"cost_estimate":{{"flops":"{flops}","transcendentals":"0","bytes_accessed":"{moved}"}}'
        call = 'custom-call(%x), custom_call_target="tpu_custom_call"'
        return read(f"{X} ROOT %k = bf16[64,64]{{1,0}} {call}, backend_config={{{cost}}}").seconds

    assert seconds(2_000_000, 1) == pytest.approx(2 * US)
    assert seconds(1, 5_000_000) == pytest.approx(5 * US)


def test_an_instruction_may_span_lines():
    call = """custom-call(%x), custom_call_target="tpu_custom_call", frontend_attributes={note={
"block": "1024",
}}, metadata={op_name="a"}"""
    schedule = read(f"{X}%k = bf16[64,64]{{1,0}} {call}\nROOT {gemm('y', 'k')}")
    assert schedule.cycles["gemm"] == 10_000


def test_a_collective_among_one_device_is_none():
    groups = "{{0},{1},{2},{3},{4},{5},{6},{7}}"
    entry = f"ROOT %g = bf16[64,64]{{1,0}} all-gather(%x), replica_groups={groups}, dimensions={{0}}"
    assert read(X + entry).transfers == ()


def test_the_picture_holds_every_event_once(tmp_path):
    schedule = read(f"""{X}
        {gather_start("s", "x", ROW)}
        {gemm("y", "x")}
        {gather_done("d", "s")}""")
    timeline = schedule.timeline
    assert timeline.communication.tolist() == [True, True, False]  # both directions of the row's links
    np.testing.assert_allclose(timeline.duration, [HOP, HOP, 10 * US])
    events = json.loads(write_perfetto(timeline, tmp_path / "step.json").read_text())["traceEvents"]
    threads = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert threads == ["TensorCore", "y+ links", "y- links", "z+ links", "z- links"]
    assert {e["args"]["kind"] for e in events if e["ph"] == "X"} == {"gemm", "all-gather"}


def test_text_in_another_order_than_execution_is_refused():
    with pytest.raises(ValueError, match="not scheduled"):
        read_schedule("HloModule toy\n", MACHINE)
