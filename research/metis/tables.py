"""What the compiled search of Metis reads and writes, as arrays filled from profiles and cluster."""

from typing import NamedTuple

import numpy as np

from mstrain.planner.mixed.hosts import Hosts
from mstrain.planner.mixed.profiles import Key, Profile, profile_name, sequential_sum
from research.metis.options import MetisOptions


class Tables(NamedTuple):
    """Profiles, model and limits as arrays; R profiles, L layers, K device types.

    The tables by profile have a last row of NaN, which index -1 of an absent profile finds.
    """

    row: np.ndarray  # int32 (K, tp + 1, batch + 1): index of the profile, -1 when absent
    layer_ms: np.ndarray  # (R + 1, L)
    layer_mb: np.ndarray  # (R + 1, L)
    total_ms: np.ndarray  # (R + 1,)
    sync_ms: np.ndarray  # (R + 1,) NaN for 0 too, which the reference takes for absent
    weight: np.ndarray  # (L,) share of each layer in the compute time
    memory_mb: np.ndarray  # (K,) per device
    parameters: np.ndarray  # (3,) bytes of the first, a middle and the last layer
    optimizer_ms: float
    batch_generator_ms: float
    gbs: int
    max_batch: int
    max_tp: int
    hidden: int
    sequence: int
    vocab: int


class Layout(NamedTuple):
    """One node sequence: what each rank and each node is."""

    rank_type: np.ndarray  # (N,) type index
    rank_node: np.ndarray  # (N,)
    node_intra: np.ndarray  # (nodes,) GB/s of the first host of the node's type
    node_least: np.ndarray  # (nodes,) GB/s, least over the hosts of the node's type


class Found(NamedTuple):
    """Room for the plans of one walk over S stages; a cost of NaN marks a plan without a needed profile."""

    cost: np.ndarray  # (n,) ms
    attempt: np.ndarray  # (n,) partition attempt that fitted
    dp: np.ndarray  # (n, S)
    bounds: np.ndarray  # (n, S + 1) first layer of each stage, and the end
    missing: np.ndarray  # (3,) type, tp, batch of a profile that the walk needs


def build_tables(options: MetisOptions, cluster: Hosts, profiles: dict[Key, Profile], reference: Profile) -> Tables:
    """Arrays over the types of the cluster, numbered in alphabetical order.

    The reference profile alone supplies the optimizer and batch generator times, the parameters, and (by its
    type's smallest profile) the relative weight of the layers. ValueError when that profile is absent.
    """
    types = cluster.device_types
    smallest = (reference.device_type, 1, 1)
    if smallest not in profiles:
        raise ValueError(f"{profile_name(smallest)} is missing; it supplies the relative times of the layers")
    keys = [key for key in profiles if key[1] <= cluster.num_devices and key[2] <= options.gbs]
    most_tp, most_batch = max(key[1] for key in keys), max(key[2] for key in keys)
    row = np.full((len(types), most_tp + 1, most_batch + 1), -1, np.int32)
    for index, (device_type, tp, batch) in enumerate(keys):
        row[types.index(device_type), tp, batch] = index
    weights = np.array(profiles[smallest].layer_ms, np.float64)
    parameters = reference.parameter_bytes
    return Tables(
        row=row,
        layer_ms=_with_nan_row([profiles[key].layer_ms for key in keys]),
        layer_mb=_with_nan_row([profiles[key].layer_mb for key in keys]),
        total_ms=_with_nan_row([sequential_sum(profiles[key].layer_ms) for key in keys]),
        sync_ms=_with_nan_row([profiles[key].sync_ms or np.nan for key in keys]),
        weight=weights / sequential_sum(weights),
        memory_mb=np.array([cluster.type_memory_gb[device_type] * 1024.0 for device_type in types]),
        parameters=np.array([parameters[0], parameters[1], parameters[-1]], np.float64),
        optimizer_ms=2.0 * reference.optimizer_ms,
        batch_generator_ms=float(reference.batch_generator_ms),
        gbs=options.gbs,
        max_batch=options.max_profiled_batch_size,
        max_tp=options.max_profiled_tp_degree,
        hidden=options.hidden_size,
        sequence=options.sequence_length,
        vocab=options.vocab_size,
    )


def _with_nan_row(rows: list) -> np.ndarray:
    table = np.array(rows, np.float64)
    return np.concatenate([table, np.full_like(table[:1], np.nan)])


def build_layout(cluster: Hosts, node_sequence: tuple[str, ...]) -> Layout:
    """Ranks and nodes type by type in the order of the node sequence, all nodes as large as the first."""
    types, slots = cluster.device_types, cluster.nodes[0].slots
    rank_type, node_intra, node_least = [], [], []
    for device_type in node_sequence:
        nodes = cluster.nodes_of(device_type)
        rank_type += [types.index(device_type)] * sum(node.slots for node in nodes)
        node_intra += [nodes[0].intra_gb_s] * len(nodes)
        node_least += [min(node.intra_gb_s for node in nodes)] * len(nodes)
    return Layout(
        np.array(rank_type, np.int64),
        np.arange(len(rank_type)) // slots,
        np.array(node_intra, np.float64),
        np.array(node_least, np.float64),
    )


def room_for_plans(num_devices: int, num_stages: int) -> Found:
    """As many rows as a walk has steps: every stage halves its replicas at most log2(devices) times."""
    rows = num_stages * num_devices.bit_length() + 1
    return Found(
        np.empty(rows),
        np.empty(rows, np.int64),
        np.empty((rows, num_stages), np.int64),
        np.empty((rows, num_stages + 1), np.int64),
        np.full(3, -1, np.int64),
    )
