"""How long simulations may take, in processor time, so that a busy machine does not fail them."""

import time

import numpy as np

from mstrain.simulator.cluster import Cluster, Device, Switch
from mstrain.simulator.placement import Degrees, Placement
from mstrain.simulator.simulate import simulate
from research.distir import experiments
from research.distir.grid import simulate_mlp
from research.distir.mlp import Mlp
from research.distir.transform_mlp import mlp_step
from tests.simulator.networks import Pairs, Torus

CHIP = Device(1e14, 1.2e12)


def processor_seconds(work):
    """(result, seconds) of the second call: the first one may compile."""
    work()
    begin = time.process_time()
    result = work()
    return result, time.process_time() - begin


def test_the_notebook_grid_takes_less_than_two_seconds():
    for rules in ("notebook", "corrected"):
        (rows, _), seconds = processor_seconds(lambda rules=rules: experiments.grid(rules))
        assert len(rows) == 52 and seconds < 2.0


def test_a_million_operations_per_second_where_no_two_links_are_alike():
    degrees = Degrees(4, 4, 4, 16)
    bandwidths = 25e9 * np.random.default_rng(0).uniform(0.5, 1.0, (64, 64))
    cluster = Cluster.homogeneous(64, CHIP, Pairs((bandwidths + bandwidths.T) / 2))
    placement = Placement(degrees)
    program = mlp_step(Mlp.square(64, 1024, 4096), degrees).expand(placement)
    result, seconds = processor_seconds(lambda: simulate(program, cluster).seconds)
    assert result > 0 and program.num_ops > 5e4 and program.num_ops / seconds > 1e6


def test_ten_million_operations_per_second_where_ranks_are_alike():
    mlp, degrees = Mlp.square(64, 8192, 8192, 2), Degrees(16, 16, 4, 16)
    cluster = Cluster.homogeneous(degrees.world, CHIP, Switch(25e9, 1e-6))
    result, seconds = processor_seconds(lambda: simulate_mlp(mlp, degrees, cluster))
    assert result.peak_bytes > 0 and result.program.num_ops / seconds > 1e7


def test_65536_devices_take_less_than_ten_seconds_and_keep_only_one_rank_of_each_stage():
    mlp, degrees = Mlp.square(128, 16384, 64 * 128 * 4, 2), Degrees(64, 16, 64, 128)
    for network in (Switch(25e9, 1e-6), Torus((64, 64, 16), 25e9, 1e-6)):
        cluster = Cluster.homogeneous(degrees.world, CHIP, network)
        begin = time.process_time()
        result = simulate_mlp(mlp, degrees, cluster)
        assert result.peak_bytes > 0 and time.process_time() - begin < 10.0
        assert result.program.num_ops > 1e8 and len(result.program.spec) < 2e5
        assert len(result.timeline().lanes) <= 64 * 13  # compute, and both ends of six links
