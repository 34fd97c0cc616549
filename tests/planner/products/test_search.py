"""The search finds what a naive loop finds, keeps its constraints, and states why candidates are slower."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstrain.hardware import Link, parse_target
from mstrain.hardware.constants import AxisLinks, Constants, constants_for
from mstrain.hardware.pod import factorizations
from mstrain.parallel.dataflow import Projection
from tests.planner.products.blocks import GPT3
from tests.planner.products.tuner import tune

TOKENS = 128 * 2048


def machine(
    bandwidth_row=3e10, bandwidth_col=6e10, launch=2e-5, sync=4e-6, flops=2e14, overlap="max", hbm_bandwidth=None
):
    def axis(bandwidth):
        return AxisLinks(
            Link(launch, sync, bandwidth),
            Link(1.5 * launch, sync, 0.8 * bandwidth),
            Link(launch, 10 * sync, 0.6 * bandwidth),
        )

    return Constants("test", "made up", flops, axis(bandwidth_row), axis(bandwidth_col), overlap, hbm_bandwidth)


def naive_seconds(p, tokens, rows, cols, flow, slices, turned, k):
    """One projection's three GeMMs, written out from the paper's text without the package's tables."""
    x, w, y = 2 * tokens * p.in_dim, 2 * p.in_dim * p.out_dim, 2 * tokens * p.out_dim
    along_cols, along_rows = {"os": (x, w), "ls": (y, w)}.get(flow, (x, y))
    if (flow == "rs" and not turned) or (flow != "rs" and turned):
        along_cols, along_rows = along_rows, along_cols
    chips, total = rows * cols, 0.0
    gemm = 2 * tokens * p.in_dim * p.out_dim / chips / slices / k.flops

    def travel(links, n, size, scatter):
        if n == 1:
            return 0.0
        link = links.reduce_scatter if scatter else links.all_gather
        return link.launch + (n - 1) * (link.sync + size / chips / slices / link.bandwidth)

    # Slices of the one product that accumulates also take what memory needs: both gathered operands, and the
    # stationary matrix in float32 there and back.
    stationary = {"os": y, "ls": x, "rs": w}[flow] // 2
    accumulating = 0.0
    if k.hbm_bandwidth and slices > 1:
        gathered = along_cols / rows + along_rows / cols
        accumulating = (gathered / slices + 2 * 4 * stationary / chips) / k.hbm_bandwidth

    for scatter_cols, scatter_rows in ((False, False), (True, False), (False, True)):
        multiply = gemm if scatter_cols or scatter_rows else (gemm**4 + accumulating**4) ** 0.25
        a = travel(k.col, cols, along_cols, scatter_cols)
        b = travel(k.row, rows, along_rows, scatter_rows)
        fill = a + b if scatter_cols or scatter_rows else max(a, b)
        total += fill + (slices - 1) * max(a, b, multiply) + multiply
    return total


def naive_legal(p, tokens, rows, cols, flow, slices, turned):
    both = rows * cols // math.gcd(rows, cols)
    token_axis, feature_axis = (cols, rows) if turned else (rows, cols)
    if flow == "os":
        return p.in_dim % (both * slices) == 0 and tokens % token_axis == 0 and p.out_dim % feature_axis == 0
    if flow == "ls":
        return p.out_dim % (both * slices) == 0 and tokens % token_axis == 0 and p.in_dim % feature_axis == 0
    return tokens % (both * slices) == 0 and p.in_dim % feature_axis == 0 and p.out_dim % token_axis == 0


def brute_force(projections, tokens, devices, k, most):
    """(seconds, mesh, [(flow, slices)]) over all meshes, all mixes of os and ls, all rs, all slice counts."""
    best = None
    mixes = list(itertools.product(("os", "ls"), repeat=len(projections)))
    if len(projections) % 2 == 0:
        mixes.append(("rs",) * len(projections))
    for rows in range(1, devices + 1):
        if devices % rows:
            continue
        for mix in mixes:
            picks, total = [], 0.0
            for i, (p, flow) in enumerate(zip(projections, mix)):
                turned = flow == "rs" and i % 2 == 1
                options = [
                    (naive_seconds(p, tokens, rows, devices // rows, flow, s, turned, k), s)
                    for s in range(1, most + 1)
                    if naive_legal(p, tokens, rows, devices // rows, flow, s, turned)
                ]
                if not options:
                    break
                total += min(options)[0]
                picks.append((flow, min(options)[1]))
            else:
                if best is None or total < best[0]:
                    best = total, (rows, devices // rows), picks
    return best


dims = st.sampled_from([24, 48, 64, 96, 120, 256, 480])


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(dims, dims), min_size=1, max_size=4),
    tokens=dims,
    devices=st.sampled_from([1, 2, 4, 6, 8]),
    row=st.floats(1e5, 1e9),
    col=st.floats(1e5, 1e9),
    launch=st.floats(0, 1e-3),
    flops=st.floats(1e7, 1e12),
    memory=st.none() | st.floats(1e5, 1e10),
)
def test_equals_brute_force(sizes, tokens, devices, row, col, launch, flops, memory):
    projections = [Projection(f"p{i}", *size) for i, size in enumerate(sizes)]
    k = machine(row, col, launch, launch / 5, flops, hbm_bandwidth=memory)
    expected = brute_force(projections, tokens, devices, k, 12)
    if expected is None:
        with pytest.raises(ValueError, match="nearest mesh that fits"):
            tune(projections, tokens, devices, k, max_slices=12)
        return
    tuning = tune(projections, tokens, devices, k, max_slices=12)
    assert math.isclose(tuning.best.seconds, expected[0], rel_tol=1e-9)
    found = sum(
        naive_seconds(p, tokens, *tuning.mesh, c.dataflow, c.slices, c.transposed, k)
        for p, c in zip(projections, tuning.best.choices)
    )
    assert math.isclose(found, expected[0], rel_tol=1e-9)  # the choice itself costs that, not only the figure


@settings(max_examples=40, deadline=None)
@given(factor=st.floats(1.01, 100), overlap=st.sampled_from(["max", "average", "none"]))
def test_more_bandwidth_is_never_slower(factor, overlap):
    slow, fast = machine(overlap=overlap), machine(3e10 * factor, 6e10 * factor, overlap=overlap)
    assert tune(GPT3, TOKENS, 64, fast).best.seconds < tune(GPT3, TOKENS, 64, slow).best.seconds


@settings(max_examples=30, deadline=None)
@given(launch=st.floats(0, 1.0))
def test_slicing_is_never_worse_than_collective(launch):
    k = machine(launch=launch)
    sliced, whole = tune(GPT3, TOKENS, 32, k), tune(GPT3, TOKENS, 32, k, max_slices=1)
    assert set(whole.slices.values()) == {1}
    assert sliced.best.seconds <= whole.best.seconds
    assert all(1 in dict(choice.trials) for choice in sliced.best.choices)


def test_launch_cost_decides_the_slice_count():
    assert set(tune(GPT3, TOKENS, 32, machine(launch=1.0)).slices.values()) == {1}
    free = tune(GPT3, TOKENS, 32, machine(launch=0, sync=0)).best
    assert all(choice.slices == max(dict(choice.trials)) for choice in free.choices)


def test_parts_add_up_and_candidates_are_ranked():
    tuning = tune(GPT3, TOKENS, 256, machine())
    for c in tuning.candidates:
        assert c.seconds == pytest.approx(c.compute + c.exposed)
        assert c.compute == pytest.approx(sum(6 * TOKENS * p.in_dim * p.out_dim for p in GPT3) / 256 / 2e14)
        assert c.exposed > 0 and c.communication == pytest.approx(
            c.traffic.row + c.traffic.col + c.latency.row + c.latency.col
        )
    seconds = [c.seconds for c in tuning.candidates]
    assert seconds == sorted(seconds) and tuning.candidates[0] is tuning.best
    assert len(tuning.candidates) + len(tuning.rejected) == 2 * len(factorizations(256))


def test_losers_say_why():
    tuning = tune(GPT3, TOKENS, 256, constants_for(parse_target("v5p:8x8x4")))
    why = {(c.rows, c.cols, c.family): c.why for c in tuning.candidates}
    assert why[(*tuning.mesh, tuning.best.family)] == "" and all(why[key] for key in why if why[key] != "")
    assert why[8, 32, "os/ls"] == "col traffic 4.4x"  # (32 - 1) / (8 - 1)
    assert why[64, 4, "os/ls"] == "row traffic 2.0x"  # (64 - 1) / (32 - 1)
    slow = tune([Projection("p", 4096, 4096)], 4096, 64, machine(1e15, 1e15, launch=0, sync=1.0))
    assert {c.why for c in slow.candidates if 64 in (c.rows, c.cols) and c.family == "os/ls"} <= {
        "latency of the 64-device row axis",
        "latency of the 64-device col axis",
    }


def test_every_projection_turns_or_none():
    tuning = tune(GPT3, 512, 16, machine())
    assert set(tuning.dataflows.values()) == {"rs"}  # few tokens: the weights are the largest matrices
    assert [choice.transposed for choice in tuning.best.choices] == [False, True, False, True]
    odd = tune(GPT3[:3], 512, 16, machine())
    assert "rs" not in odd.dataflows.values()
    with pytest.raises(ValueError, match="use dataflow os or ls"):
        tune(GPT3[:3], 512, 16, machine(), dataflow="rs")
    for c in tune(GPT3, TOKENS, 64, machine()).candidates:
        flows = {choice.dataflow for choice in c.choices}
        assert flows == {"rs"} or "rs" not in flows


def test_the_paper_rule_is_a_choice_and_never_beats_the_search():
    k = machine()
    rule = tune(GPT3, TOKENS, 64, k, dataflow="rule")
    assert list(rule.dataflows.values()) == ["os", "ls", "os", "ls"]
    mixed = tune([*GPT3[:1], Projection("small", 64, 64)], 4096, 4, k, dataflow="rule")
    assert "rs" not in mixed.dataflows.values()
    assert tune(GPT3, TOKENS, 64, k).best.seconds <= rule.best.seconds


def test_a_torus_offers_only_its_whole_axes():
    pod = parse_target("v6e-256")
    tuning = tune(GPT3, TOKENS, 256, constants_for(pod), meshes=pod)
    assert {(c.rows, c.cols) for c in tuning.candidates} == {(1, 256), (16, 16), (256, 1)}
    replicated = tune(GPT3, TOKENS, 16, constants_for(pod), meshes=pod)
    assert {(c.rows, c.cols) for c in replicated.candidates} == {(1, 16), (16, 1)}
    with pytest.raises(ValueError, match="256 devices, which 24 does not divide"):
        tune(GPT3, TOKENS, 24, constants_for(pod), meshes=pod)


@pytest.mark.parametrize(
    "call, message",
    [
        (
            dict(meshes=[(4, 4)], devices=8),
            r"row4-col4 does not have 8 devices; use row1-col8, row2-col4, row4-col2, row8",
        ),
        (dict(meshes=[], devices=2), r"does not have 2 devices; use row1-col2, row2-col1"),
        (dict(meshes=[(3, 2)], devices=6, tokens=1024), r"1024 is not a multiple of 3 .*that fits is row2-col3"),
        (dict(devices=7), r"nearest mesh that fits is row1-col1"),
        (dict(meshes=[(4, 2)], devices=8, slices=5), r"in_proj .* slice count 5 is illegal. Use 4 or 6"),
        (dict(devices=0), "devices must be 1 or more"),
        (dict(devices=8, dataflow="is"), r"os, ls, rs"),
        (dict(devices=8, projections=[]), "a projection or more"),
        (dict(devices=8, slices=0), "1 or more"),
    ],
)
def test_mistakes_name_the_fix(call, message):
    arguments = {"projections": GPT3, "tokens": TOKENS, "constants": machine(), **call}
    with pytest.raises(ValueError, match=message):
        tune(**arguments)
