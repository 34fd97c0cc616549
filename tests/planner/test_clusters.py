"""Names of clusters, and what two levels of links cost."""

import pytest

from mstrain.hardware import collective_seconds
from mstrain.planner.clusters import find_fabric
from mstrain.planner.stated.fabric import Group
from mstrain.planner.target import fabric_links, find_pod


@pytest.mark.parametrize("name, devices, per_node, network", [
    ("h100:16384", 16384, 8, 400e9), ("a100-80gb:8x64@200GB/s", 512, 8, 200e9), ("a100:8x2@25gb/s", 16, 8, 25e9),
    ("h200:4", 4, 4, float("inf")), ("gb200:144", 144, 72, 3600e9), ("l4:16", 16, 8, 12.5e9), ("t4:4x2", 8, 4, 12.5e9),
    ("4xv5p-512", 1024, 256, 256 / 4 * 25e9), ("v5p-512", 256, 256, float("inf")), ("h100-pcie:16", 16, 8, 50e9),
])  # fmt: skip
def test_names(name, devices, per_node, network):
    fabric = find_fabric(name)
    assert (fabric.devices, fabric.per_node, fabric.node_bandwidth) == (devices, per_node, network)


@pytest.mark.parametrize("name, fix", [
    ("h100:0", "between 1"), ("h100:12", "nodes of 8"), ("a900:8", "h100"), ("h100:8x2@0GB/s", "carries nothing"),
    ("0xv5p-512", "4xv5p-512"), ("h100:999999999", "10000000"), ("4xv5p-511", "v5p-512"), ("", "v5p-512"),
])  # fmt: skip
def test_a_wrong_name_is_answered_with_a_right_one(name, fix):
    with pytest.raises(ValueError, match=fix) as raised:
        find_fabric(name)
    assert "\n" not in str(raised.value)


def test_rings_cost_what_their_two_levels_do():
    fabric = find_fabric("a100-80gb:8x64@200GB/s")
    inside, across = fabric.group(8, 1), fabric.group(64, 8)
    assert (inside, across) == (Group(8, 1), Group(1, 64))
    whole = fabric.group(512, 1)
    assert whole == Group(8, 64)
    nbytes = 1e9
    for group, stride in ((inside, 1), (across, 8), (whole, 1)):
        link = fabric.axis_links(group.size, stride).all_gather
        ring = collective_seconds(link, nbytes / group.size, group.size)
        assert ring == pytest.approx(fabric.scatter_seconds(nbytes, group), rel=1e-6)
    assert fabric.scatter_seconds(nbytes, across) > 8 * fabric.scatter_seconds(nbytes, inside)


def test_slower_networks_and_more_nodes_never_speed_a_ring_up():
    fast, slow = find_fabric("h100:8x64@400GB/s"), find_fabric("h100:8x64@100GB/s")
    assert slow.scatter_seconds(1e9, slow.group(512, 1)) > fast.scatter_seconds(1e9, fast.group(512, 1))
    times = [fast.scatter_seconds(1e9, fast.group(size, 1)) for size in (2, 4, 8, 16, 64, 512)]
    assert times == sorted(times)


def test_the_axes_of_a_pod_use_the_links_they_cross():
    pod = find_pod("h100:64")
    pipeline, data, row, col = fabric_links(pod.fabric, (2, 4, 1, 8))
    assert col.all_gather.bandwidth > 5 * data.all_gather.bandwidth
    assert pipeline.permute.bandwidth == pytest.approx(data.permute.bandwidth)
    assert find_pod("4xv5p-128").meshes(4) == find_pod("v5p-128").meshes(1)
    assert find_pod("4xv5p-128").meshes(2) == ()


def test_a_gpu_multiplies_at_the_rate_of_the_shape():
    pod = find_pod("a100-80gb:8")
    constants = pod.constants((1, 1, 1, 8), "bf16")
    assert constants.shaped and constants.flops < 0.9 * pod.chip.peak_bf16
    with pytest.raises(ValueError, match="dtype=f32"):
        find_pod("t4:4", "bf16")
    assert find_pod("t4:4", "f32").devices == 4
