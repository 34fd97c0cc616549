"""The links of axis `expert`, which divides the replicas of a mesh into groups that exchange tokens by all-to-all.

On a torus half of a device's bytes cross the middle of each axis, so the time of an exchange is that of the longest
axis that a group spans, independent of the number of axes.
"""

from mstrain.hardware.constants import AxisLinks
from mstrain.hardware.link import NETWORK_HOP, Link
from mstrain.hardware.pod import Pod, node_group
from mstrain.hardware.torus_parts import torus_axes


def _torus_axes(pod: Pod, sizes: tuple[int, ...], expert: int) -> tuple[tuple[int, ...], ...] | None:
    """The torus axes of the axes (stage, data, expert, context, row, col) of a plan, if they have whole ones."""
    stage, data, *rest = sizes
    if pod.tpu_slice is None or data % (expert * pod.slices):
        return None
    return torus_axes(pod.tpu_slice.physical_axes, (stage, data // expert // pod.slices, expert, *rest))


def owner_links(pod: Pod, sizes: tuple[int, ...], expert: int) -> AxisLinks:
    """The links between devices that have the same experts."""
    owned = _torus_axes(pod, sizes, expert)
    if owned is None or pod.slices > 1:
        return pod.links(sizes).replica
    return pod.links_over((*owned[1], *owned[3]))


def exchange_link(pod: Pod, sizes: tuple[int, ...], expert: int) -> Link:
    """The link that an exchange along axis `expert` takes, for a device; the axis is a factor of the replicas in
    `sizes`.

    Seconds of bytes sent, those for the device itself included: launch + sync + bytes / bandwidth.
    """
    _, _, context, rows, cols = sizes
    link = pod.links(sizes).replica.permute
    if pod.tpu_slice is None:
        inner, outer = node_group(pod.per_node, expert, context * rows * cols)
        if outer == 1:
            return Link(link.launch, link.sync, link.bandwidth * expert / max(1, expert - 1))
        network = pod.network_bandwidth() * outer / (outer - 1)
        return Link(link.launch, NETWORK_HOP, network)
    one, axes = pod.links((1, 1, 1, 1, 1)).replica.permute, pod.tpu_slice.physical_axes
    if owned := _torus_axes(pod, sizes, expert):
        longest, directions = max(axes[number] for number in owned[2]), 2 if pod.tpu_slice.wraps else 1
    else:  # a part of a torus axis, an open line
        longest, directions = min(expert, max(axes)), 1
    return Link(one.launch, one.sync * longest / 2, 4 * directions * one.bandwidth / longest)
