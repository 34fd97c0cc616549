"""The whole Metis search: every inter-stage plan, walked by the compiled kernel, ranked by cost.

`run_metis` reproduces the reference (SamsungLabs/Metis, with the improved walk of livingshade/Metis), defects
included: half-costed and incomplete plans are ranked too, and counted in the result. The reference leaves the order of
the types and the profile that supplies the optimizer time to chance; here they are options.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mstrain.hardware.hosts import Hosts, read_hosts
from mstrain.hardware.layer_profiles import PER_LAYER, Key, Profile, check_layers, profile_name, read_profiles
from mstrain.planner.clock import Clock, divisors
from research.metis.groups import device_groups
from research.metis.kernel import walk_all
from research.metis.options import MetisOptions
from research.metis.result import MetisResult, SearchStopped
from research.metis.tables import Tables, build_layout, build_tables, room_for_plans

CHUNK = 64  # device groups walked between looks at the clock


def run_metis(
    hostfile: str | Path, clusterfile: str | Path, profile_dir: str | Path, options: MetisOptions
) -> MetisResult:
    """Search as the reference does and return the ranking and its statistics.

    Raises ValueError for bad input, with the file and the fix; SearchStopped, a ValueError that holds the
    plans found so far in `partial`, when a profile turns out to be missing or no plan at all was found.
    """
    cluster = read_hosts(hostfile, clusterfile)
    profiles = read_profiles(profile_dir, cluster.device_types)
    check_layers(profiles, options.num_layers, list(PER_LAYER))
    check_slots(hostfile, cluster)
    order = tuple(options.device_order) or cluster.device_types
    if sorted(order) != list(cluster.device_types):
        raise ValueError(
            f"device_order={','.join(order)}: name each type of the host file once ({', '.join(cluster.device_types)})"
        )
    reference = reference_profile(options, profiles)
    tables = build_tables(options, cluster, profiles, reference)
    name = profile_name((reference.device_type, reference.tp, reference.batch))
    results = [MetisResult(options, order, name) for _ in range(options.trials)]
    results[-1].seconds = sum(search(result, cluster, tables) for result in results) / options.trials
    return results[-1]


def check_slots(hostfile, cluster: Hosts) -> None:
    """The reference reads one digit of the slot count and takes the first host's count for all."""
    slots = cluster.nodes[0].slots
    for node in cluster.nodes:
        if node.slots > 9:
            raise ValueError(
                f"{hostfile}: {node.address} slots={node.slots}: Metis reads one digit, "
                f"here {str(node.slots)[0]}; write several hosts of at most 9 slots or use the "
                "optimal planner, which takes any count"
            )
    if cluster.num_devices > slots * len(cluster.nodes):
        raise ValueError(
            f"{hostfile}: Metis takes the first host's {slots} slots for all hosts; put the "
            "host with the most slots first or use the optimal planner: it takes unequal hosts"
        )


def reference_profile(options: MetisOptions, profiles: dict[Key, Profile]) -> Profile:
    """The profile that supplies what the reference takes from whichever file the directory lists first."""
    if not options.reference_profile:
        first_type = next(iter(profiles))[0]
        return profiles[max(key for key in profiles if key[0] == first_type)]
    by_name = {profile_name(key): profile for key, profile in profiles.items()}
    if options.reference_profile not in by_name:
        raise ValueError(
            f"reference_profile={options.reference_profile}: no such profile; choose one of "
            f"the folder, e.g. {next(iter(by_name))}"
        )
    return by_name[options.reference_profile]


def group_lists(options: MetisOptions, num_devices: int, first_sequence: bool) -> Iterator[tuple[int, np.ndarray]]:
    """(number of stages costed, (n, stages) device groups) in the order of the reference.

    After the first node sequence, one stage is never tried again; instead the groups of the next number of
    stages come once with only their first stage costed. This slip of the reference is kept for equal counts.
    """
    slip = not first_sequence
    for stages in range(1 if first_sequence else 2, min(num_devices, options.num_layers) + 1):
        for costed in (1, stages) if slip else (stages,):
            groups = device_groups(num_devices, stages, options.min_group_scale_variance, options.max_permute_len)
            while chunk := list(itertools.islice(groups, CHUNK)):
                slip = False
                yield costed, np.array(chunk, np.int64)


def search(result: MetisResult, cluster: Hosts, tables: Tables) -> float:
    """Walk every inter-stage plan within the budget; fills the result and returns the seconds."""
    options, devices = result.options, cluster.num_devices
    clock = Clock(options.max_seconds)
    batch_counts = np.array(divisors(options.gbs)[::-1])
    for index, sequence in enumerate(itertools.permutations(result.device_order)):
        layout = build_layout(cluster, sequence)
        for num_stage, groups in group_lists(options, devices, index == 0):
            # Steps of a walk: every stage halves its replicas at most log2(devices) times.
            most, at = groups.shape[1] * devices.bit_length() + 1, 0
            found = room_for_plans(max(most, 4096), groups.shape[1])
            while at < groups.shape[0] * len(batch_counts):
                left = options.max_plans - result.inter_stage_plans
                if left <= 0 or clock.over:
                    result.exhausted = True
                    check_found(result)
                    return clock.seconds
                before = at
                at, plans, steps = walk_all(
                    tables, layout, groups, num_stage, batch_counts, options.use_strat, (at, left, most), found
                )
                result.inter_stage_plans += at - before
                result.count += int(steps)
                result.add(sequence, num_stage, groups, batch_counts, found, int(plans))
                if found.missing[0] >= 0:
                    kind, tp, batch = found.missing.tolist()
                    batches = int(batch_counts[(at - 1) % len(batch_counts)])
                    message = missing_profile_message(options, (cluster.device_types[kind], tp, batch), batches)
                    raise SearchStopped(message, result)
    check_found(result)
    return clock.seconds


def check_found(result: MetisResult) -> None:
    if result.plans_costed:
        return
    reason = (
        "no plan fits this cluster: the layers need more memory than any division of the "
        "devices has; add devices or memory, or lower the global batch"
    )
    if result.exhausted:
        tried = result.inter_stage_plans
        reason = f"no plan among the {tried} tried within the budget; raise max_seconds or max_plans"
    raise SearchStopped(reason, result)


def missing_profile_message(options: MetisOptions, key: Key, batches: int) -> str:
    fix = "add it, or lower max_profiled_tp_degree and max_profiled_batch_size to what is profiled"
    if key[2] & (key[2] - 1):
        fix = (
            f"gbs={options.gbs} in {batches} microbatches is not divisible into profiled batches; use a "
            "power of two, add the profile, or use the optimal planner, which takes any batch"
        )
    return f"{profile_name(key)} is missing: {fix}"
