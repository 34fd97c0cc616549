"""Constants files, and constants derived from the table of chips."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from mstrain.hardware import all_chips, chip_named, parse_target
from mstrain.hardware.constants import constants_for, load_constants
from mstrain.parallel.dataflow import Projection
from mstrain.parallel.product_cost import Layout
from tests.planner.products.tuner import layout_cost, tune


def test_shipped_files_hold_the_published_numbers(reference):
    assert reference.flops == 242 * 1024**4
    assert (reference.row.all_gather.bandwidth, reference.col.all_gather.bandwidth) == (27.472e9, 79.751e9)
    assert (reference.row.reduce_scatter.bandwidth, reference.col.permute.sync) == (37.506e9, 50e-6)
    simulator = load_constants("tpu_v4_simulator")
    assert (simulator.overlap, simulator.flops) == ("average", 249e12)
    assert simulator.row.reduce_scatter.bandwidth == 50e9


def test_a_saved_file_loads_equal(reference, tmp_path):
    for mine in reference, constants_for(chip_named("v6e")):
        mine.save(tmp_path / "mine.json")
        assert load_constants(tmp_path / "mine.json") == mine


def test_bad_files_and_names_say_what_to_do(reference, tmp_path):
    with pytest.raises(ValueError, match="tpu_v4_reference"):
        load_constants("tpu_v4_referense")
    reference.save(path := tmp_path / "mine.json")
    entry = json.loads(path.read_text())
    del entry["row"]["permute"]
    path.write_text(json.dumps(entry))
    with pytest.raises(ValueError, match="permute.*compare it with"):
        load_constants(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="not a constants file"):
        load_constants(path)
    with pytest.raises(ValueError, match=r"use max \| average \| none"):
        replace(reference, overlap="sum")
    with pytest.raises(ValueError, match="flops must be positive"):
        replace(reference, flops=0)
    with pytest.raises(ValueError, match="hbm_bandwidth must be positive"):
        replace(reference, hbm_bandwidth=-1.0)
    path.write_text("[]")
    with pytest.raises(ValueError, match="not a constants file"):
        load_constants(path)


def test_every_tpu_and_linked_gpu_has_derived_constants():
    for chip in all_chips().values():
        if chip.name == "cpu":
            assert constants_for(chip) == load_constants("cpu_emulated")
        elif chip.ici_bandwidth is None or chip.peak_bf16 is None:
            with pytest.raises(ValueError, match="bench=collectives"):
                constants_for(chip)
        else:
            derived = constants_for(chip)
            assert 0.5 * chip.peak_bf16 < derived.flops < chip.peak_bf16
            assert derived.row == derived.col
            assert derived.row.reduce_scatter.launch == chip.launch_reduce_scatter


@pytest.mark.parametrize("dataflow", ["os", "ls", "rs"])
def test_where_nothing_overlaps_time_is_the_sum_and_one_slice_is_best(dataflow):
    constants = constants_for(chip_named("v3"))
    layout = Layout(Projection("up", 4096, 16384), 32768, 4, 8, dataflow)
    costs = [layout_cost(layout, slices, constants) for slices in (1, 2, 4)]
    for cost in costs:
        assert cost.seconds == pytest.approx(cost.compute + cost.communication)
    assert costs[0].seconds < costs[1].seconds < costs[2].seconds
    there_and_back = [layout.projection, Projection("down", 16384, 4096)]  # rs turns its output
    tuning = tune(there_and_back, layout.tokens, 32, constants, dataflow=dataflow)
    assert {choice.slices for choice in tuning.best.choices} == {1}


def test_memory_bounds_how_fast_slices_are_accumulated():
    """On v6e a slice of the OS product reads and writes 805 MB of float32 sums, its operands once in all."""
    v6e = constants_for(chip_named("v6e"))
    layout = Layout(Projection("up", 12288, 49152), 65536, 4, 8, "os")
    operands, sums = layout.accumulating_seconds(v6e)
    assert sums == pytest.approx(8 * 16384 * 6144 / 1638e9)
    assert operands == pytest.approx(2 * 12288 * (16384 + 6144) / 1638e9)
    gemm = layout.gemm_seconds(v6e)
    few, many = (layout_cost(layout, slices, v6e).compute for slices in (4, 8))
    assert few == pytest.approx(2 * gemm + (gemm**4 + (operands + 4 * sums) ** 4) ** 0.25)
    assert many == pytest.approx(2 * gemm + (gemm**4 + (operands + 8 * sums) ** 4) ** 0.25)
    assert 3 * gemm < few < 3.1 * gemm  # the matrix unit takes longer
    assert 2 * gemm + operands + 8 * sums < many
    unknown = replace(v6e, hbm_bandwidth=None)
    assert layout_cost(layout, 8, unknown).compute == pytest.approx(3 * gemm)


def test_closed_rings_use_both_directions_and_gpu_axes_share_the_ports():
    one_way = chip_named("v5p").ici_bandwidth
    assert constants_for(chip_named("v5p")).row.all_gather.bandwidth == one_way
    assert constants_for(parse_target("v5p-64")).row.all_gather.bandwidth == one_way
    assert constants_for(parse_target("v5p-512")).row.all_gather.bandwidth == 2 * one_way
    assert constants_for(chip_named("h100")).col.all_gather.bandwidth == 225e9


def test_tuning_imports_no_matplotlib():
    code = "import sys, mstrain.parallel.tune; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
