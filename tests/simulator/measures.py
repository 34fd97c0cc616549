"""Figures of programs and simulations that tests compare."""

import numpy as np

from mstrain.simulator.program import Program
from mstrain.simulator.simulate import Simulation
from mstrain.timeline import device_use


def op_counts(program: Program) -> dict[str, int]:
    """Operations of the whole job by kind."""
    per_spec = np.bincount(program.spec, weights=program.copies, minlength=len(program.specs))
    counts: dict[str, int] = {}
    for spec, count in zip(program.specs, per_spec.astype(np.int64).tolist()):
        counts[spec.kind] = counts.get(spec.kind, 0) + count
    return counts


def device_seconds(result: Simulation) -> dict[int, float]:
    """Seconds until each simulated device has ended its last operation, on its compute unit and its links."""
    done: dict[int, float] = {}
    for lane, end in zip(result.lanes, result.lane_end.tolist()):
        done[lane.device] = max(done.get(lane.device, 0.0), end)
    return done


def communication_fraction(result: Simulation) -> float:
    """Time of communication / (time of communication + time of compute)."""
    compute, links, _ = map(sum, zip(*device_use(result.timeline()).values()))
    return links / (compute + links)


def num_events(result: Simulation) -> int:
    """Trace events of the job, one per operation and device, including ranks that are not simulated."""
    members = np.array([len(group) for group in result.program.groups])[result.program.group]
    silent = np.bincount(
        result.held.owner(), weights=np.isnan(result.action_seconds), minlength=len(result.held.lengths)
    )
    return int(members @ result.program.copies - silent[result.action].sum())
