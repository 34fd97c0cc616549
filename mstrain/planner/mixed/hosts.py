"""Host file and cluster file of Metis: who is in the cluster and how it is wired.

A host file has one host per line, `ADDRESS slots=K` (or `ADDRESS K`), K being its number of devices. A
cluster file is a JSON object from address to device type, bandwidths in GB/s and memory in GB per device.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from mstrain.json_files import parse_json

CLUSTER_FIELDS = ("instance_type", "inter_bandwidth", "intra_bandwidth", "memory")


@dataclass(frozen=True)
class Node:
    """One host: `slots` devices of one type; bandwidths in GB/s, memory in GB per device."""

    address: str
    device_type: str
    slots: int
    inter_gb_s: float
    intra_gb_s: float
    memory_gb: float


@dataclass(frozen=True)
class Hosts:
    """The nodes in host file order; Metis takes a type's memory from its first cluster file entry."""

    nodes: tuple[Node, ...]
    type_memory_gb: dict[str, float]

    @property
    def num_devices(self) -> int:
        return sum(node.slots for node in self.nodes)

    @property
    def device_types(self) -> tuple[str, ...]:
        """The types present, in alphabetical order."""
        return tuple(sorted({node.device_type for node in self.nodes}))

    def nodes_of(self, device_type: str) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.device_type == device_type)


def read_hosts(hostfile: str | Path, clusterfile: str | Path) -> Hosts:
    """Join the two files. ValueError names the file, the line or entry, and what to write instead."""
    entries = read_clusterfile(clusterfile)
    nodes = []
    for line_number, address, slots in read_hostfile(hostfile):
        if address not in entries:
            raise ValueError(
                f"{hostfile}:{line_number}: host {address} is not in {clusterfile}; "
                f"add an entry for it there (known: {', '.join(entries)})"
            )
        entry = entries[address]
        nodes.append(
            Node(
                address,
                entry["instance_type"],
                slots,
                entry["inter_bandwidth"],
                entry["intra_bandwidth"],
                entry["memory"],
            )
        )
    type_memory = {}
    for entry in entries.values():
        type_memory.setdefault(entry["instance_type"], entry["memory"])
    return Hosts(tuple(nodes), type_memory)


def read_hostfile(path: str | Path) -> list[tuple[int, str, int]]:
    """(line number, address, slots) of every host; blank lines and `#` comments are skipped."""
    hosts = []
    for line_number, line in enumerate(read_text(path, "host file").splitlines(), start=1):
        text = line.split("#")[0].strip()
        if not text:
            continue
        match = re.fullmatch(r"(\S+)\s+(?:slots=)?(\d+)", text)
        if not match:
            raise ValueError(
                f"{path}:{line_number}: cannot read {text!r}; write ADDRESS slots=K, e.g. 10.0.0.1 slots=8"
            )
        address, slots = match.group(1), int(match.group(2))
        if slots < 1:
            raise ValueError(
                f"{path}:{line_number}: {address} has no devices; write slots=1 or more, or remove the line"
            )
        hosts.append((line_number, address, slots))
    if not hosts:
        raise ValueError(f"{path}: no hosts; write one line ADDRESS slots=K per host")
    return hosts


def read_clusterfile(path: str | Path) -> dict[str, dict]:
    """Entries by address, every field checked."""
    try:
        entries = parse_json(read_text(path, "cluster file"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}:{error.lineno}: not JSON ({error.msg}); write an object "
            'like {"10.0.0.1": {"instance_type": "A100", ...}}'
        ) from None
    if not isinstance(entries, dict) or not entries:
        raise ValueError(f"{path}: expected an object from address to {', '.join(CLUSTER_FIELDS)}")
    for address, entry in entries.items():
        _check_entry(path, address, entry)
    return entries


def _check_entry(path, address: str, entry) -> None:
    missing = [field for field in CLUSTER_FIELDS if not isinstance(entry, dict) or field not in entry]
    if missing:
        raise ValueError(f"{path}: entry {address} lacks {', '.join(missing)}; add it")
    if not isinstance(entry["instance_type"], str) or not entry["instance_type"]:
        raise ValueError(f'{path}: entry {address}: instance_type must be a name such as "A100"')
    for field in CLUSTER_FIELDS[1:]:
        value = entry[field]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            unit = "GB per device" if field == "memory" else "GB/s"
            raise ValueError(f"{path}: entry {address}: {field} is {value!r}; write a positive number of {unit}")
        if field != "memory" and value > 1e6:
            raise ValueError(f"{path}: entry {address}: {field} {value:g} looks like bytes/s; write GB/s")


def read_text(path: str | Path, what: str) -> str:
    """The file's text, or a ValueError that says which file is missing."""
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise ValueError(f"{path}: cannot read the {what} ({reason}); give the path of an existing file") from None


def write_hostfile(path: str | Path, devices_per_type: int) -> None:
    """The synthetic host file of the reference: devices_per_type // 4 hosts of V100, then as many of A100."""
    hosts = devices_per_type // 4
    if hosts < 1:
        raise ValueError(f"devices_per_type={devices_per_type}: hosts have 4 devices; give 4 or more")
    Path(path).write_text("0.0.0.1 slots=4\n" * hosts + "0.0.0.4 slots=4\n" * hosts)
