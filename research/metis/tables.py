"""The inputs and outputs of the compiled search of Metis as arrays."""

from typing import NamedTuple

import numpy as np

from mstrain.hardware.hosts import Hosts
from mstrain.hardware.layer_profiles import Key, Profile, profile_name, sequential_sum
from research.metis.options import MetisOptions


class Tables(NamedTuple):
    """Profiles, model and limits as arrays; R profiles, L layers, K device types.

    The last row of the tables by profile is NaN: an absent profile has index -1.
    """

    row: np.ndarray  # int32 (K, tp + 1, batch + 1): index of the profile, -1 when absent
    layer_ms: np.ndarray  # (R + 1, L)
    layer_mb: np.ndarray  # (R + 1, L)
    total_ms: np.ndarray  # (R + 1,)
    sync_ms: np.ndarray  # (R + 1,) NaN also for 0, which the reference treats as absent
    weight: np.ndarray  # (L,) fraction of the compute time of the model
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
    """Type and node of each of N ranks in one node sequence."""

    rank_type: np.ndarray  # (N,) type index
    rank_node: np.ndarray  # (N,)
    node_intra: np.ndarray  # (nodes,) GB/s of the first host of the node's type
    node_least: np.ndarray  # (nodes,) GB/s, smallest of the hosts of the node's type


class Found(NamedTuple):
    """Plans of several walks, of S stages; the cost is NaN if a profile is missing."""

    cost: np.ndarray  # (n,) ms
    attempt: np.ndarray  # (n,) number of the layer partition that fits, from 1
    walk: np.ndarray  # (n,) number of the walk
    dp: np.ndarray  # (n, S)
    bounds: np.ndarray  # (n, S + 1) first layer of each stage, and the end of the last
    missing: np.ndarray  # (3,) type, tp, batch of a profile that the last walk needs


def build_tables(options: MetisOptions, cluster: Hosts, profiles: dict[Key, Profile], reference: Profile) -> Tables:
    """Arrays over the types of the cluster, numbered in alphabetical order.

    `reference` supplies the times of optimizer and batch generator and the parameters; the profile of its type with tp
    and batch 1 supplies the fraction of the compute time of each layer. Raises ValueError if the latter is missing.
    """
    types = cluster.device_types
    smallest = (reference.device_type, 1, 1)
    if smallest not in profiles:
        raise ValueError(f"{profile_name(smallest)} is missing; it supplies the relative times of the layers")
    keys = [key for key in profiles if key[1] <= cluster.num_devices and key[2] <= options.gbs]
    row = np.full((len(types), max(key[1] for key in keys) + 1, max(key[2] for key in keys) + 1), -1, np.int32)
    for index, (device_type, tp, batch) in enumerate(keys):
        row[types.index(device_type), tp, batch] = index

    def table(value) -> np.ndarray:
        rows = np.array([value(profiles[key]) for key in keys], np.float64)
        return np.concatenate([rows, np.full_like(rows[:1], np.nan)])

    weights, parameters = np.array(profiles[smallest].layer_ms, np.float64), reference.parameter_bytes
    return Tables(
        row=row,
        layer_ms=table(lambda profile: profile.layer_ms),
        layer_mb=table(lambda profile: profile.layer_mb),
        total_ms=table(lambda profile: sequential_sum(profile.layer_ms)),
        sync_ms=table(lambda profile: profile.sync_ms or np.nan),
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


def build_layout(cluster: Hosts, node_sequence: tuple[str, ...]) -> Layout:
    """Ranks and nodes in the order of the node sequence; as in the reference, all nodes have the size of the first."""
    by_type = [cluster.nodes_of(device_type) for device_type in node_sequence]
    nodes = [(node, mine[0].intra_gb_s, min(each.intra_gb_s for each in mine)) for mine in by_type for node in mine]
    rank_type = [cluster.device_types.index(node.device_type) for node, _, _ in nodes for _ in range(node.slots)]
    return Layout(
        np.array(rank_type, np.int64),
        np.arange(len(rank_type)) // cluster.nodes[0].slots,
        np.array([intra for _, intra, _ in nodes], np.float64),
        np.array([least for _, _, least in nodes], np.float64),
    )


def allocate_plans(num_plans: int, num_stages: int) -> Found:
    """Uninitialized arrays for `num_plans` plans."""
    number = np.empty(num_plans, np.int64)
    shape = num_plans, num_stages
    return Found(np.empty(num_plans), number, number.copy(), np.empty(shape, np.int64),
                 np.zeros((num_plans, num_stages + 1), np.int64), np.full(3, -1, np.int64))  # fmt: skip
