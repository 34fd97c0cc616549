"""The search of Metis: all inter-stage plans (node sequence, device groups, microbatches), ranked by cost.

`run_metis` reproduces the reference (SamsungLabs/Metis, with the improved search of livingshade/Metis) including its
defects: plans of which only some stages are costed, and plans without some of the layers, are ranked, too; the result
counts them. In the reference, the order of the device types and the profile that supplies the optimizer time are
undetermined; here they are options.
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
from research.metis.tables import Tables, allocate_plans, build_layout, build_tables

CHUNK = 64  # device groups evaluated between checks of the time limit


def run_metis(
    hostfile: str | Path, clusterfile: str | Path, profile_dir: str | Path, options: MetisOptions
) -> MetisResult:
    """Searches as the reference does; returns the ranking and statistics.

    Raises ValueError for invalid input, with the file and the fix; SearchStopped, a ValueError with the plans found so
    far in `partial`, if a profile is missing or no plan was found.
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
    """Raises ValueError for slot counts that the reference misreads: it reads one digit, that of the first host."""
    slots = cluster.nodes[0].slots
    for node in cluster.nodes:
        if node.slots > 9:
            raise ValueError(
                f"{hostfile}: {node.address} slots={node.slots}: Metis reads one digit, "
                f"here {str(node.slots)[0]}; write several hosts of at most 9 slots or type "
                "planner=optimal, which reads any count"
            )
    if cluster.num_devices > slots * len(cluster.nodes):
        raise ValueError(
            f"{hostfile}: Metis takes the first host's {slots} slots for all hosts; put the "
            "host with the most slots first, or type planner=optimal, which supports unequal hosts"
        )


def reference_profile(options: MetisOptions, profiles: dict[Key, Profile]) -> Profile:
    """The profile of the times and sizes that the reference reads from the first file in the directory listing."""
    if not options.reference_profile:
        first_type = next(iter(profiles))[0]
        return profiles[max(key for key in profiles if key[0] == first_type)]
    by_name = {profile_name(key): profile for key, profile in profiles.items()}
    if options.reference_profile not in by_name:
        raise ValueError(
            f"reference_profile={options.reference_profile}: no such profile; choose one of "
            f"the folder, such as {next(iter(by_name))}"
        )
    return by_name[options.reference_profile]


def group_lists(options: MetisOptions, num_devices: int, first_sequence: bool) -> Iterator[tuple[int, np.ndarray]]:
    """(number of stages costed, (n, stages) device groups) in the order of the reference.

    After the first node sequence, plans of one stage are not evaluated again. Instead, the groups of the next number of
    stages are evaluated twice, the first time with the cost of their first stage only. This defect of the reference is
    reproduced, so that its counts are, too.
    """
    first_stage_only = not first_sequence
    for stages in range(1 if first_sequence else 2, min(num_devices, options.num_layers) + 1):
        for costed in (1, stages) if first_stage_only else (stages,):
            groups = device_groups(num_devices, stages, options.min_group_scale_variance, options.max_permute_len)
            while chunk := list(itertools.islice(groups, CHUNK)):
                first_stage_only = False
                yield costed, np.array(chunk, np.int64)


def search(result: MetisResult, cluster: Hosts, tables: Tables) -> float:
    """Evaluates all inter-stage plans within the limits; adds plans to `result` and returns the seconds."""
    options, devices = result.options, cluster.num_devices
    clock = Clock(options.max_seconds)
    batch_counts = np.array(divisors(options.gbs)[::-1])
    for index, sequence in enumerate(itertools.permutations(result.device_order)):
        layout = build_layout(cluster, sequence)
        for num_stage, groups in group_lists(options, devices, index == 0):
            # The largest number of plans of a walk: every stage halves its replicas at most log2(devices) times.
            most, at = groups.shape[1] * devices.bit_length() + 1, 0
            found = allocate_plans(max(most, 4096), groups.shape[1])
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
    """Raises SearchStopped if no plan was costed."""
    if result.plans_costed:
        return
    reason = (
        "no plan fits this cluster: the layers need more memory than any division of the "
        "devices has; add devices or memory, or lower the global batch"
    )
    if result.exhausted:
        tried = result.inter_stage_plans
        reason = f"none of the {tried} inter-stage plans evaluated so far fits; raise max_seconds or max_plans"
    raise SearchStopped(reason, result)


def missing_profile_message(options: MetisOptions, key: Key, batches: int) -> str:
    fix = "add it, or lower max_profiled_tp_degree and max_profiled_batch_size to what is profiled"
    if key[2] & (key[2] - 1):
        fix = (
            f"gbs={options.gbs} in {batches} microbatches is not divisible into profiled batches; use a "
            "power of two, add the profile, or type planner=optimal, which supports any batch"
        )
    return f"{profile_name(key)} is missing: {fix}"
