"""Published and reference figures, to the digits printed."""

from dataclasses import replace

import pytest

from mstrain.hardware import parse_target
from mstrain.hardware.constants import constants_for
from mstrain.parallel.dataflow import Projection, legal_slices
from mstrain.parallel.product_cost import Layout, communication_terms
from tests.planner.products.blocks import GPT3, MEGATRON
from tests.planner.products.reference import analytic, emulated
from tests.planner.products.tuner import choose_dataflow, layout_cost, traffic_bytes, tune

BATCH_CHIPS, BATCH_HALF = 256 * 2048, 128 * 2048
PEAK = 272e12  # what the paper divides by
RULE = ("os", "ls", "os", "ls")


@pytest.mark.parametrize(
    "block, mesh, figures",
    [
        (GPT3, (4, 64), (518.874, 47.856, 43.463)),
        (GPT3, (8, 32), (255.319, 33.088, 16.348)),
        (GPT3, (16, 16), (123.541, 18.560, 8.558)),
        (GPT3, (32, 8), (59.466, 16.544, 10.893)),
        (GPT3, (64, 4), (88.703, 27.916, 14.689)),
        (MEGATRON, (32, 8), (135.162, 31.020, 13.447)),
        (MEGATRON, (16, 16), (205.902, 23.200, 12.155)),
    ],
)
def test_reference_first_stage(reference, block, mesh, figures):
    found = analytic(block, BATCH_CHIPS, *mesh, reference)
    assert tuple(round(1e3 * x, 3) for x in (found.traffic, found.latency, found.pipeline)) == figures


def test_reference_first_stage_prefers_32x8(reference):
    shapes = [(4, 64), (8, 32), (16, 16), (32, 8), (64, 4)]
    estimates = {s: analytic(GPT3, BATCH_CHIPS, *s, reference) for s in shapes}
    assert min(shapes, key=lambda s: estimates[s].traffic + estimates[s].latency) == (32, 8)


@pytest.mark.parametrize(
    "block, mesh, milliseconds, slices",
    [
        (GPT3, (32, 8), 99.339, (16, 8, 24, 24)),
        (GPT3, (16, 16), 144.598, None),
        (GPT3, (64, 4), 128.594, None),
        (MEGATRON, (32, 8), 251.521, (20, 10, 20, 20)),
    ],
)
def test_reference_second_stage(reference, block, mesh, milliseconds, slices):
    seconds, found = emulated(block, BATCH_CHIPS, *mesh, reference)
    assert round(1e3 * seconds, 3) == milliseconds
    assert slices is None or found == slices


def utilisation(block, seconds, chips=256, tokens=BATCH_HALF):
    return round(sum(6 * tokens * p.in_dim * p.out_dim for p in block) / (chips * PEAK * seconds), 3)


@pytest.mark.parametrize(
    "block, figures",
    [
        (GPT3, {(32, 8): 0.638, (64, 4): 0.488, (16, 16): 0.396, (8, 32): 0.212}),
        (MEGATRON, {(32, 8): 0.791, (16, 16): 0.648, (64, 4): 0.600, (8, 32): 0.355}),
    ],
)
def test_exhaustive_search_with_simulator_constants(simulator, block, figures):
    tuning = tune(block, BATCH_HALF, 256, simulator)
    assert tuning.mesh == (32, 8)
    assert tuple(tuning.dataflows.values()) == RULE
    kept = [c for c in tuning.candidates if c.family == "os/ls"]
    found = {(c.rows, c.cols): utilisation(block, c.seconds) for c in kept}
    assert {mesh: found[mesh] for mesh in figures} == figures


@pytest.mark.parametrize(
    "block, figures",
    [
        (GPT3, {1: 0.400, 2: 0.519, 4: 0.602, 8: 0.622, 16: 0.485}),
        (MEGATRON, {1: 0.474, 2: 0.607, 4: 0.703, 8: 0.757, 16: 0.772}),
    ],
)
def test_slice_sweep_at_32x8(simulator, block, figures):
    for slices, figure in figures.items():
        tuning = tune(block, BATCH_HALF, 256, simulator, meshes=[(32, 8)], slices=slices)
        assert utilisation(block, tuning.best.seconds) == figure


@pytest.mark.parametrize("block, figure", [(GPT3, 0.454), (MEGATRON, 0.658)])
def test_all_output_stationary_at_32x8(simulator, block, figure):
    tuning = tune(block, BATCH_HALF, 256, simulator, meshes=[(32, 8)], dataflow="os")
    assert utilisation(block, tuning.best.seconds) == figure


@pytest.mark.parametrize("block, figure", [(GPT3, 0.738), (MEGATRON, 0.848)])
def test_average_rule_with_blocks_of_eight(simulator, block, figure):
    average, total = replace(simulator, overlap="average"), 0.0
    for p, dataflow in zip(block, RULE):
        legal = legal_slices(p.in_dim // 8, p.out_dim // 8, BATCH_HALF // 8, 32, 8, dataflow)
        layout = Layout(p, BATCH_HALF, 32, 8, dataflow)
        total += min(layout_cost(layout, s, average).seconds for s in legal)
    assert utilisation(block, total) == figure


def test_constants_decide_the_shape(reference, simulator):
    assert tune(MEGATRON, BATCH_HALF, 256, simulator).mesh == (32, 8)
    measured = tune(MEGATRON, BATCH_HALF, 256, reference)
    assert measured.mesh == (16, 16)
    assert utilisation(MEGATRON, measured.best.seconds) == 0.787


def test_rule_of_the_largest_matrix():
    assert tuple(choose_dataflow(p.in_dim, p.out_dim, BATCH_HALF) for p in GPT3) == RULE
    assert tuple(choose_dataflow(p.in_dim, p.out_dim, BATCH_HALF) for p in MEGATRON) == RULE
    assert {choose_dataflow(p.in_dim, p.out_dim, 8 * 2048) for p in MEGATRON} == {"rs"}


def test_balance_of_a_v5p_layer():
    """GPT-3 ff1 on 256 v5p chips, S = 8: a slice multiplies in 370 us, gathers X in 122 and W in 102."""
    layout = Layout(GPT3[2], BATCH_HALF, 32, 8, "os")
    v5p = constants_for(parse_target("v5p:8x8x4"))
    gathers = communication_terms(layout, v5p)[0]
    assert layout.gemm_seconds(v5p) / 8 == pytest.approx(370e-6, rel=0.01)
    assert gathers.traffic_col / 8 == pytest.approx(122e-6, rel=0.01)
    assert gathers.traffic_row / 8 == pytest.approx(102e-6, rel=0.02)
    cost = layout_cost(layout, 8, v5p)
    assert 0 < cost.exposed < 0.2 * cost.compute  # both gathers fit under the GeMM, save the first


def test_traffic_of_a_published_layer():
    """MeshSlice paper section 7: a (1024K, 12K, 48K) layer on 32x8, data parallel 4, 2 bytes."""
    tokens = 1024 * 1024 // 4
    layer = Layout(Projection("ff2", 49152, 12288), tokens, 32, 8, "ls")
    col, row = (size / 3 for size in traffic_bytes(layer))
    assert col / 1e6 == pytest.approx(176.2, abs=0.05) and row / 1e6 == pytest.approx(146.3, abs=0.05)
