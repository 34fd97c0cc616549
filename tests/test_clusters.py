"""Names of clusters, and what two levels of links cost."""

import pytest

from mstrain.hardware import collective_seconds
from mstrain.hardware.clusters import find_pod
from mstrain.hardware.pod import node_group


@pytest.mark.parametrize("name, devices, per_node, network", [
    ("h100:16384", 16384, 8, 400e9), ("a100-80gb:8x64@200GB/s", 512, 8, 200e9), ("a100:8x2@25gb/s", 16, 8, 25e9),
    ("h200:4", 4, 4, float("inf")), ("gb200:144", 144, 72, 3600e9), ("l4:16", 16, 8, 12.5e9),
    ("4xv5p-512", 1024, 256, 256 / 4 * 25e9), ("v5p-512", 256, 256, float("inf")), ("h100-pcie:16", 16, 8, 50e9),
    ("h100: 8", 8, 8, float("inf")),
])  # fmt: skip
def test_names(name, devices, per_node, network):
    pod = find_pod(name)
    assert (pod.devices, pod.per_node, pod.node_bandwidth) == (devices, per_node, network)


@pytest.mark.parametrize("name, fix", [
    ("h100:0", "between 1"), ("h100:12", "nodes of 8"), ("a900:8", "h100"), ("h100:8x2@0GB/s", "has 0 GB/s"),
    ("0xv5p-512", "4xv5p-512"), ("h100:999999999", "10000000"), ("4xv5p-511", "v5p-512"), ("", "v5p-512"),
    ("h100", "GPUs are h100:16"), ("h100:8x0", "between 1"), ("h100:8x64@200Gb/s", "gigabits. Type gigabytes: @25GB/s"),
    ("16384xh100", "GPUs are h100:16"), ("h100-64", "GPUs are h100:16"), ("4 x a100:8", "GPUs are a100-80gb:16"),
    ("a100:8x64@200", "8x2@100GB/s"),
])  # fmt: skip
def test_a_wrong_name_is_answered_with_a_right_one(name, fix):
    with pytest.raises(ValueError, match=fix) as raised:
        find_pod(name)
    assert "\n" not in str(raised.value)


def gather_seconds(pod, data, nbytes=1e9):
    """An all-gather over `data` replicas of `pod.devices / data` tensor devices."""
    link = pod.links((1, data, 1, 1, pod.devices // data)).replica.all_gather
    return collective_seconds(link, nbytes / data, data)


def test_rings_cost_what_their_two_levels_do():
    pod = find_pod("a100-80gb:8x64@200GB/s")
    assert (node_group(8, 8, 1), node_group(8, 64, 8), node_group(8, 512, 1)) == ((8, 1), (1, 64), (8, 64))
    inside = collective_seconds(pod.links((1, 64, 1, 1, 8)).col.all_gather, 1e9 / 8, 8)
    assert gather_seconds(pod, 64) > 8 * inside
    parts = collective_seconds(pod.links((1, 64, 1, 1, 8)).replica.all_gather, 1e9 / 8 / 64, 64)
    assert gather_seconds(pod, 512) == pytest.approx(inside + parts, rel=1e-2)  # nodes first, then one part of each


def test_slower_networks_and_more_nodes_never_speed_a_ring_up():
    fast, slow = find_pod("h100:8x64@400GB/s"), find_pod("h100:8x64@100GB/s")
    assert gather_seconds(slow, 512) > gather_seconds(fast, 512)
    times = [gather_seconds(find_pod(f"h100:{size}"), size) for size in (2, 4, 8, 16, 64, 512)]
    assert times == sorted(times)


def test_the_axes_of_a_pod_use_the_links_they_cross():
    links = find_pod("h100:64").links((2, 4, 1, 1, 8))
    assert links.col.all_gather.bandwidth > 5 * links.replica.all_gather.bandwidth
    assert links.stage.permute.bandwidth == pytest.approx(links.replica.permute.bandwidth)
    assert find_pod("4xv5p-128").meshes(4) == find_pod("v5p-128").meshes(1)
    assert find_pod("4xv5p-128").meshes(2) == ()
    inside, across = (find_pod(name).links((1, 4, 1, 4, 4)) for name in ("v5p-128", "4xv5p-32"))
    assert across.replica.all_gather.bandwidth < inside.replica.all_gather.bandwidth


def test_a_gpu_multiplies_at_the_rate_of_the_shape():
    pod = find_pod("a100-80gb:8")
    constants = pod.constants((1, 1, 1, 1, 8), "bf16")
    assert constants.shaped and constants.flops < 0.9 * pod.chip.peak_bf16
    with pytest.raises(ValueError, match="dtype=f32"):
        find_pod("t4:4", "bf16")
    assert find_pod("t4:4x2", "f32").devices == 8
