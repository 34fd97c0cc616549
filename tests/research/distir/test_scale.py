"""Simulations of large clusters keep one of equal ranks; `python -m tests.research.agreement` times them."""

import numpy as np

from mstrain.simulator.cluster import Cluster, Device, Switch
from mstrain.simulator.placement import Degrees, Placement
from mstrain.simulator.simulate import simulate
from research.distir import experiments
from research.distir.grid import simulate_mlp
from research.distir.mlp import Mlp
from research.distir.transform_mlp import mlp_step
from tests.simulator.everything import expand
from tests.simulator.networks import Pairs, Torus

CHIP = Device(1e14, 1.2e12)


def test_the_notebook_grid_has_all_plans():
    for rules in ("notebook", "corrected"):
        assert len(experiments.grid(rules)[0]) == 52


def test_every_operation_is_simulated_where_no_two_links_are_alike():
    degrees = Degrees(4, 4, 4, 16)
    bandwidths = 25e9 * np.random.default_rng(0).uniform(0.5, 1.0, (64, 64))
    cluster = Cluster.homogeneous(64, CHIP, Pairs((bandwidths + bandwidths.T) / 2))
    placement = Placement(degrees)
    program = expand(mlp_step(Mlp.square(64, 1024, 4096), degrees), placement)
    assert simulate(program, cluster).seconds > 0 and program.num_ops > 5e4


def test_equal_ranks_are_simulated_once():
    mlp, degrees = Mlp.square(64, 8192, 8192, 2), Degrees(16, 16, 4, 16)
    cluster = Cluster.homogeneous(degrees.world, CHIP, Switch(25e9, 1e-6))
    result = simulate_mlp(mlp, degrees, cluster)
    assert result.peak_bytes > 0 and result.program.num_ops > 100 * len(result.program.spec)


def test_65536_devices_keep_only_one_rank_of_each_stage():
    mlp, degrees = Mlp.square(128, 16384, 64 * 128 * 4, 2), Degrees(64, 16, 64, 128)
    for network in (Switch(25e9, 1e-6), Torus((64, 64, 16), 25e9, 1e-6)):
        cluster = Cluster.homogeneous(degrees.world, CHIP, network)
        result = simulate_mlp(mlp, degrees, cluster)
        assert result.peak_bytes > 0
        assert result.program.num_ops > 1e8 and len(result.program.spec) < 2e5
        assert len(result.timeline().lanes) <= 64 * 13  # compute, and both ends of six links
