"""The links of axis `expert`: groups of replicas that exchange the tokens of experts by all-to-all.

On a torus, half of a device's bytes cross the middle of each axis. The time of an exchange is therefore that of the
longest axis that a group spans, whatever the number of axes.
"""

from mstrain.hardware.constants import AxisLinks
from mstrain.hardware.link import NETWORK_HOP, Link
from mstrain.hardware.pod import Pod, node_group
from mstrain.hardware.torus_parts import torus_axes


def _torus_axes(pod: Pod, sizes: tuple[int, ...], expert: int) -> tuple[tuple[int, ...], ...] | None:
    """The torus axes of the mesh axes (stage, data, expert, context, row, col) of a plan.

    None if a mesh axis is only a part of a torus axis, and without a torus.
    """
    stage, data, *rest = sizes
    if pod.tpu_slice is None or data % (expert * pod.slices):
        return None
    return torus_axes(pod.tpu_slice.physical_axes, (stage, data // expert // pod.slices, expert, *rest))


def owner_links(pod: Pod, sizes: tuple[int, ...], expert: int) -> AxisLinks:
    """The links between the devices with the same experts, over which their weights and gradients are communicated."""
    owned = _torus_axes(pod, sizes, expert)
    if owned is None or pod.slices > 1:
        return pod.links(sizes).replica
    return pod.links_over((*owned[1], *owned[3]))


def exchange_link(pod: Pod, sizes: tuple[int, ...], expert: int) -> Link:
    """The effective link of one device for an exchange along axis `expert`, a factor of the replicas in `sizes`.

    An exchange takes launch + sync + bytes / bandwidth seconds, where bytes include those that stay on the device.
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
    else:  # part of a torus axis, which is not a closed ring
        longest, directions = min(expert, max(axes)), 1
    return Link(one.launch, one.sync * longest / 2, 4 * directions * one.bandwidth / longest)
