"""Host file and cluster file of Metis: the hosts of a cluster and their links.

A host file has one host per line, `ADDRESS slots=K` (or `ADDRESS K`), where K is its number of devices, at most 9999.
An address in n lines stands for n hosts, as in the files of Metis. A cluster file is a JSON object from address to
device type, bandwidths in GB/s and memory in GB per device.
"""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from mstrain.fields import Fields, kind
from mstrain.json_files import read_json, read_text

CLUSTER_FIELDS = ("instance_type", "inter_bandwidth", "intra_bandwidth", "memory")


@dataclass(frozen=True)
class Node:
    """One host: `slots` devices of one type; bandwidths in GB/s, memory in GB per device."""

    address: str
    slots: int
    device_type: str
    inter_gb_s: float
    intra_gb_s: float
    memory_gb: float


@dataclass(frozen=True)
class Hosts:
    """The nodes in the order of the host file.

    `type_memory_gb` is the memory of the first entry of each device type in the cluster file, which Metis uses.
    """

    nodes: tuple[Node, ...]
    type_memory_gb: dict[str, float]

    @property
    def num_devices(self) -> int:
        return sum(node.slots for node in self.nodes)

    @property
    def device_types(self) -> tuple[str, ...]:
        return tuple(sorted({node.device_type for node in self.nodes}))

    @property
    def repeated(self) -> str:
        """A message about addresses that are in several lines of the host file; empty if there are none."""
        counts = Counter(node.address for node in self.nodes)
        names = ", ".join(f"{address} ({count})" for address, count in counts.items() if count > 1)
        return names and f"Addresses in several lines of the host file count as one host per line: {names}."

    def nodes_of(self, device_type: str) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.device_type == device_type)


def read_hosts(hostfile: str | Path, clusterfile: str | Path) -> Hosts:
    """The hosts of the two files. Raises ValueError, with file, line or entry, and the fix, if a file is invalid."""
    entries = read_clusterfile(clusterfile)
    nodes = []
    for line_number, line in enumerate(read_text(hostfile, "host file").splitlines(), start=1):
        text, where = line.split("#")[0].strip(), f"{hostfile}:{line_number}:"
        match = re.fullmatch(r"(\S+)\s+(?:slots=)?(\d{1,4})", text)
        if not text:
            continue
        if not match:
            raise ValueError(f"{where} cannot read {kind(text)}; write ADDRESS slots=K, e.g. 10.0.0.1 slots=8")
        address, slots = match[1], int(match[2])
        if slots < 1:
            raise ValueError(f"{where} {address} has no devices; write slots=1 or more, or remove the line")
        if address not in entries:
            raise ValueError(
                f"{where} host {address} is not in {clusterfile}; "
                f"add an entry for it there (known: {', '.join(entries)})"
            )
        nodes.append(Node(address, slots, *entries[address]))
    if not nodes:
        raise ValueError(f"{hostfile}: no hosts; write one line ADDRESS slots=K per host")
    memory = {device_type: memory for device_type, _, _, memory in reversed(entries.values())}
    return Hosts(tuple(nodes), memory)


def read_clusterfile(path: str | Path) -> dict[str, tuple]:
    """The checked values of CLUSTER_FIELDS by address. Raises ValueError if one is invalid."""
    document = read_json(path, "cluster file")
    if not isinstance(document, dict) or not document:
        raise ValueError(f"{path}: expected an object from address to {', '.join(CLUSTER_FIELDS)}")
    return {address: _entry(Fields(f"{path}: entry {address}", "", entry)) for address, entry in document.items()}


def _entry(fields: Fields) -> tuple:
    name, (inter, intra, memory) = CLUSTER_FIELDS[0], CLUSTER_FIELDS[1:]
    speeds = [fields.number(field, "GB/s") for field in (inter, intra)]
    if max(speeds) > 1e6:
        raise fields.error("bandwidth", f"{max(speeds):g} looks like bytes/s; write GB/s.")
    return fields.text(name), *speeds, fields.number(memory, "GB per device")
