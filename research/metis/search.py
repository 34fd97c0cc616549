"""The whole Metis search: every inter-stage plan, walked by the compiled kernel, ranked by cost.

`run_metis` reproduces the reference (SamsungLabs/Metis, with the improved walk of livingshade/Metis), defects
included: half-costed and incomplete plans are ranked too, and counted in the result. The two things it leaves
to chance, the order of the types and the profile that supplies the optimizer time, are options here.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from mstrain.planner.clock import Clock, divisors
from mstrain.planner.mixed.hosts import Hosts, read_hosts
from mstrain.planner.mixed.profiles import Key, Profile, check_layer_counts, profile_name, read_profiles
from research.metis.groups import device_groups
from research.metis.kernel import walk
from research.metis.options import MetisOptions
from research.metis.result import MetisResult, SearchStopped, Tally
from research.metis.tables import Found, build_layout, build_tables, room_for_plans


def run_metis(
    hostfile: str | Path, clusterfile: str | Path, profile_dir: str | Path, options: MetisOptions
) -> MetisResult:
    """Search as the reference does and return the ranking and its statistics.

    Raises ValueError for bad input, with the file and the fix; SearchStopped, a ValueError that holds the
    plans found so far in `partial`, when a profile turns out to be missing or no plan at all was found.
    """
    cluster = read_hosts(hostfile, clusterfile)
    profiles = read_profiles(profile_dir, cluster.device_types)
    check_layer_counts(profiles, options.num_layers)
    check_slots(hostfile, cluster)
    order = device_order(options, cluster)
    reference = reference_profile(options, profiles)
    tables = build_tables(options, cluster, profiles, reference)
    seconds, name = [], profile_name((reference.device_type, reference.tp, reference.batch))
    for _ in range(options.trials):
        tally, clock = Tally(options, order, name), Clock(options.max_seconds)
        search(options, cluster, order, tables, tally, clock)
        seconds.append(clock.seconds)
    return replace(tally.result(), seconds=sum(seconds) / len(seconds))


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


def device_order(options: MetisOptions, cluster: Hosts) -> tuple[str, ...]:
    if not options.device_order:
        return cluster.device_types
    if sorted(options.device_order) != list(cluster.device_types):
        raise ValueError(
            f"device_order={','.join(options.device_order)}: name each type of the host file "
            f"once ({', '.join(cluster.device_types)})"
        )
    return tuple(options.device_order)


def reference_profile(options: MetisOptions, profiles: dict[Key, Profile]) -> Profile:
    """The profile that supplies what the reference takes from whichever file the directory lists first."""
    if options.reference_profile:
        by_name = {profile_name(key): profile for key, profile in profiles.items()}
        if options.reference_profile not in by_name:
            raise ValueError(
                f"reference_profile={options.reference_profile}: no such profile; choose one of "
                f"the folder, e.g. {next(iter(by_name))}"
            )
        return by_name[options.reference_profile]
    first_type = next(iter(profiles))[0]
    return max(
        (profile for profile in profiles.values() if profile.device_type == first_type),
        key=lambda profile: (profile.tp, profile.batch),
    )


def inter_stage_groups(options: MetisOptions, num_devices: int, first_sequence: bool) -> Iterator[tuple]:
    """(number of stages costed, device groups) in the order of the reference.

    After the first node sequence, one stage is never tried again; instead the groups of the next number of
    stages come once with only their first stage costed. This slip of the reference is kept for equal counts.
    """
    most = min(num_devices, options.num_layers)
    limits = (options.min_group_scale_variance, options.max_permute_len)
    if not first_sequence:
        counts = (stages for stages in range(2, most + 1) if any(device_groups(num_devices, stages, *limits)))
        for stages in itertools.islice(counts, 1):
            yield from ((1, group) for group in device_groups(num_devices, stages, *limits))
    for stages in range(1 if first_sequence else 2, most + 1):
        yield from ((stages, group) for group in device_groups(num_devices, stages, *limits))


def search(options: MetisOptions, cluster: Hosts, order: tuple[str, ...], tables, tally: Tally, clock: Clock) -> None:
    """Walk every inter-stage plan within the budget; fills the tally."""
    batch_counts = divisors(options.gbs)[::-1]
    room: dict[int, Found] = {}
    for index, sequence in enumerate(itertools.permutations(order)):
        layout = build_layout(cluster, sequence)
        for num_stage, groups in inter_stage_groups(options, cluster.num_devices, index == 0):
            if len(groups) not in room:
                room[len(groups)] = room_for_plans(cluster.num_devices, len(groups))
            found = room[len(groups)]
            sizes = np.array(groups, np.int64)
            for batches in batch_counts:
                if tally.inter_stage_plans >= options.max_plans or clock.over:
                    tally.exhausted = True
                    return check_found(tally)
                plans, steps = walk(tables, layout, sizes, num_stage, batches, options.use_strat, found)
                tally.add(sequence, num_stage, groups, batches, found, plans, steps)
                if found.missing[0] >= 0:
                    kind, tp, batch = found.missing
                    raise SearchStopped(
                        missing_profile_message(options, (cluster.device_types[kind], int(tp), int(batch)), batches),
                        tally.result(),
                    )
    check_found(tally)


def check_found(tally: Tally) -> None:
    """SearchStopped when the search ends without any plan."""
    if tally.plans_costed:
        return
    if tally.exhausted:
        raise SearchStopped(
            f"no plan among the {tally.inter_stage_plans} tried within the budget; raise max_seconds or max_plans",
            tally.result(),
        )
    raise SearchStopped(
        "no plan fits this cluster: the layers need more memory than any division of the "
        "devices has; add devices or memory, or lower the global batch",
        tally.result(),
    )


def missing_profile_message(options: MetisOptions, key: Key, batches: int) -> str:
    if key[2] & (key[2] - 1):
        fix = (
            f"gbs={options.gbs} in {batches} microbatches is not divisible into profiled batches; use a "
            "power of two, add the profile, or use the optimal planner, which takes any batch"
        )
    else:
        fix = "add it, or lower max_profiled_tp_degree and max_profiled_batch_size to what is profiled"
    return f"{profile_name(key)} is missing: {fix}"
