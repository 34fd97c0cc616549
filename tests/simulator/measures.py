"""What tests ask of programs and simulations."""

import numpy as np

from mstrain.simulator.program import Program
from mstrain.simulator.simulate import Simulation


def op_counts(program: Program) -> dict[str, int]:
    """Operations of the whole job by kind."""
    per_spec = np.bincount(program.spec, weights=program.copies, minlength=len(program.specs))
    counts: dict[str, int] = {}
    for spec, count in zip(program.specs, per_spec.astype(np.int64).tolist()):
        counts[spec.kind] = counts.get(spec.kind, 0) + count
    return counts


def device_seconds(result: Simulation) -> dict[int, float]:
    """When each kept device is done, on its compute unit and its links."""
    done: dict[int, float] = {}
    for lane, end in zip(result.lanes, result.lane_end.tolist()):
        done[lane.device] = max(done.get(lane.device, 0.0), end)
    return done
