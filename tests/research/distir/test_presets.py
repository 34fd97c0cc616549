"""Clusters from the table of chips."""

import pytest

from mstrain.hardware import chip_named
from mstrain.simulator.placement import Degrees
from research.distir.grid import grid_search, simulate_mlp
from research.distir.mlp import Mlp
from tests.simulator.networks import Torus
from tests.simulator.presets import slice_cluster, switch_cluster


def test_a_slice_is_a_torus_of_its_chips():
    cluster = slice_cluster("v5p-128")
    chip = chip_named("v5p")
    assert len(cluster.devices) == 64 and cluster.network == Torus(
        (4, 4, 4), chip.ici_bandwidth, chip.sync, chip.launch_permute, wrap=True
    )
    assert cluster.devices[0].flops == chip.peak_bf16 and cluster.devices[0].memory_bytes == chip.hbm_bytes
    assert not slice_cluster("v5e-16").network.wrap


def test_a_grid_on_a_slice_gives_plans_that_fit_and_account_for_the_step():
    rows, rejected = grid_search(Mlp.square(16, 4096, 4096, 2), 16, slice_cluster("v5e-16"))
    assert rows and not [reason for _, reason in rejected if "lower the pipeline degree" not in reason]
    for row in rows:
        assert 0 <= row["exposed_fraction"] <= row["idle_fraction"] + 1e-9 < 1
        if (row["pp_degree"], row["hp_degree"]) == (1, 1):
            assert row["exposed_fraction"] == pytest.approx(row["idle_fraction"])
    best = max(rows, key=lambda row: row["throughput"])
    alone = simulate_mlp(Mlp.square(16, 4096, 4096, 2), Degrees(), slice_cluster("v5e-16"))
    assert best["throughput"] > 4096 / alone.seconds


def test_what_the_table_does_not_know_is_refused():
    with pytest.raises(ValueError, match="choose a generation with one device per chip"):
        slice_cluster("v3-32")
    with pytest.raises(ValueError, match="the table of chips has no peak"):
        switch_cluster("cpu", 2, 1e9)
    assert switch_cluster("h100", 8, 450e9).devices[7].kind == "h100"
