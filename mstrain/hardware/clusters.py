"""Names of clusters: TPU slices, several of them, and GPUs in nodes.

`v5p-512` and `v6e:8x8` are TPU slices; `4xv5p-512` is four slices joined by the data-center network. `h100:16384` is
GPUs in nodes of eight (up to eight GPUs are one node). `a100-80gb:8x64@200GB/s` is 64 nodes of 8 GPUs with 200 GB/s of
network bandwidth per node in one direction. What the name omits (nodes, links, network) is that of the table of chips.
"""

import re

from mstrain.hardware import Chip, all_chips, chip_for, parse_target
from mstrain.hardware.pod import Pod, pod_of

ALIASES = {
    "a100": "a100-80gb", "a100-sxm": "a100-80gb", "a100-80gb-pcie": "a100-pcie", "h100-sxm": "h100",
    "h100-80gb": "h100", "h200-sxm": "h200", "b200-sxm": "b200",
}  # fmt: skip
MOST_DEVICES = 10**7
SPELLINGS = "v5p-512 | 4xv5p-512 | h100:16384 | a100-80gb:8x64@200GB/s (8 per node, 64 nodes, GB/s per node one way)"


def gpu_named(name: str) -> Chip | None:
    """The GPU called `name`: its name in the table of chips, an alias, or its JAX name; None for any other chip."""
    chip = all_chips().get(ALIASES.get(name.lower(), name.lower())) or chip_for(name)
    return chip if chip is not None and chip.platform == "gpu" else None


def gpu_pod(
    chip: Chip, devices: int, per_node: int | None = None, node_bandwidth: float | None = None, name: str = ""
) -> Pod:
    """A pod of `devices` GPUs in nodes of `per_node`, with `node_bandwidth` bytes/s per node in one direction.

    Values that are None are those of the table of chips. Raises ValueError if the devices do not fill their nodes, and
    if the table has no network bandwidth.
    """
    usual = chip.node_devices or 8
    per_node = per_node or min(usual, devices)
    if devices % per_node:
        raise ValueError(
            f"{devices} devices do not fill nodes of {per_node}. Type a multiple, such as {chip.name}:"
            f"{-(-devices // per_node) * per_node}, or {chip.name}:NxM for M nodes of N."
        )
    if devices > per_node and node_bandwidth is None:
        node_bandwidth = chip.node_bandwidth
        if node_bandwidth is None:
            raise ValueError(f"The table of chips has no network of {chip.name}. Type @GB/s, as in @50GB/s.")
        node_bandwidth *= per_node / usual
    return Pod(name or f"{chip.name}:{devices}", chip, devices, None, per_node, node_bandwidth or float("inf"))


def find_pod(cluster: str, dtype: str = "bf16") -> Pod:
    """The cluster called `cluster`, as in the docstring of this module.

    Raises ValueError for an unknown name, with the spellings, and if the table of chips lacks a number.
    """
    try:
        pod = _named(cluster.strip(), cluster)
    except ValueError as error:
        names = " | ".join(name for name, chip in all_chips().items() if chip.platform == "gpu")
        raise ValueError(f"cluster={cluster}: {error} Spellings: {SPELLINGS}. GPUs: {names}.") from None
    missing = [name for name in ("hbm_bytes", "hbm_bandwidth") if getattr(pod.chip, name) is None]
    if missing:
        raise ValueError(f"cluster={cluster}: the table of chips has no {' or '.join(missing)} for {pod.chip.name}.")
    pod.constants((1, pod.devices, 1, 1, 1), dtype)  # raises for any other missing number
    return pod


def _named(text: str, cluster: str) -> Pod:
    gpus = re.fullmatch(r"([\w.-]+):(\d{1,9})(?:x(\d{1,9}))?(?:@(\d+(?:\.\d+)?)(GB/s))?", text.replace(" ", ""), re.I)
    if gpus and (chip := gpu_named(gpus[1])):
        first, second = int(gpus[2]), int(gpus[3]) if gpus[3] else None
        devices = first * (1 if second is None else second)
        if not 1 <= devices <= MOST_DEVICES:
            raise ValueError(f"{devices} devices are not between 1 and {MOST_DEVICES}.")
        if gpus[5] == "Gb/s":
            raise ValueError(f"{gpus[4]}Gb/s are gigabits. Type gigabytes: @{float(gpus[4]) / 8:g}GB/s.")
        network = float(gpus[4]) * 1e9 if gpus[4] else None
        if network == 0:
            raise ValueError("The network has 0 GB/s. Type its bandwidth per node in one direction.")
        return gpu_pod(chip, devices, first if second else None, network, cluster)
    named = (gpu_named(part.strip()) for part in (text.partition(":")[0], *re.split(r"[\s:]|^\d+\s*x|-(?=\d+$)", text)))
    if chip := next(filter(None, named), None):
        name = chip.name
        raise ValueError(f"GPUs are {name}:16, {name}:8x2 (8 per node, 2 nodes) or {name}:8x2@100GB/s.")
    tpu_slice = parse_target(text)
    return pod_of(tpu_slice, tpu_slice.devices)
