"""The planner of Metis for one device type: all stages have the same (dp, tp) and microbatch size."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mstrain.hardware.hosts import read_hosts
from mstrain.hardware.layer_profiles import Profile, check_layers, profile_name, read_profiles, sequential_sum
from mstrain.planner.clock import divisors
from research.metis.kernel import BYTES_PER_MS
from research.metis.options import MetisOptions
from research.metis.search import reference_profile


@dataclass(frozen=True)
class HomogeneousPlan:
    """A plan: `cost` in milliseconds per step, parallel degrees, and `microbatch` in samples."""

    cost: float
    dp: int
    pp: int
    tp: int
    microbatch: int


@dataclass(frozen=True)
class HomogeneousResult:
    """The number of plans, the costed ones in order of cost, and the file names of profiles that are missing."""

    num_plans: int
    ranking: tuple[HomogeneousPlan, ...]
    missing: tuple[str, ...]


def run_homogeneous(
    hostfile: str | Path, clusterfile: str | Path, profile_dir: str | Path, options: MetisOptions
) -> HomogeneousResult:
    """Costs every plan as the reference does, which takes the intra-node bandwidth of the first host for all links.

    Raises ValueError for invalid input, a cluster of several device types, or if no plan has a profile.
    """
    cluster = read_hosts(hostfile, clusterfile)
    device_type, *others = cluster.device_types
    if others:
        raise ValueError(
            f"{hostfile}: types {', '.join(cluster.device_types)}; keep hosts of one type, or type planner=metis"
        )
    profiles = read_profiles(profile_dir, cluster.device_types)
    check_layers(profiles, options.num_layers, ["layer_ms"])
    reference = reference_profile(options, profiles)
    costed, missing, plans = [], [], 0
    for dp, pp, tp in degrees(cluster.num_devices, options):
        for microbatch in (size for size in divisors(options.gbs) if size * dp <= options.gbs):
            plans += 1
            key = (device_type, tp, microbatch)
            if key not in profiles:
                missing.append(profile_name(key))
                continue
            cost = plan_cost(options, profiles[key], reference, (dp, pp, tp), cluster.nodes[0].intra_gb_s)
            costed.append(HomogeneousPlan(cost, dp, pp, tp, microbatch))
    if not costed:
        raise ValueError(f"{profile_dir}: no plan has a profile; add one, such as {missing[0]}")
    return HomogeneousResult(plans, tuple(sorted(costed, key=lambda plan: plan.cost)), tuple(missing))


def degrees(num_devices: int, options: MetisOptions) -> Iterator[tuple[int, int, int]]:
    """All (dp, pp, tp) that use every device. With more stages than layers, some stages have no layers."""
    for pp in range(1, num_devices + 1):
        for tp in range(1, options.max_profiled_tp_degree + 1):
            dp = num_devices // pp // tp
            if dp * pp * tp == num_devices:
                yield dp, pp, tp


def split_layers(num_layers: int, pp: int) -> Iterator[tuple[int, int]]:
    """Layers [begin, end) of each stage; stages from 1 on have the remainder of an even split."""
    even, rest = divmod(num_layers - 2, pp)
    counts = [even + (1 <= stage <= rest) for stage in range(pp)]
    counts[0] += 1
    counts[-1] += 1
    return itertools.pairwise(itertools.accumulate(counts, initial=0))


def plan_cost(
    options: MetisOptions, profile: Profile, reference: Profile, plan: tuple[int, int, int], bandwidth_gb_s: float
) -> float:
    """Milliseconds per step of a plan (dp, pp, tp)."""
    dp, pp, tp = plan
    batches = options.gbs // profile.batch // dp
    speed = bandwidth_gb_s * BYTES_PER_MS
    embedding, middle, output = (reference.parameter_bytes[index] / tp for index in (0, 1, -1))
    stage_ms, stage_parameters, p2p = [], [], 0.0
    for begin, end in split_layers(options.num_layers, pp):
        stage_ms.append(sequential_sum(profile.layer_ms[begin:end]))
        first, last = begin == 0, end == options.num_layers
        stage_parameters.append(middle * (end - begin - first - last) + embedding * first + output * last)
        if not last:
            width = options.vocab_size / tp if end == options.num_layers - 1 else options.hidden_size
            p2p += profile.batch * options.sequence_length * width / speed
    return (
        (batches - 1) * max(stage_ms)
        + sequential_sum(stage_ms)
        + profile.sync_ms * batches
        + 2 * reference.optimizer_ms / pp / tp
        + 2 * (dp - 1) / (dp * speed) * max(stage_parameters)
        + p2p
        + reference.batch_generator_ms * batches
    )
