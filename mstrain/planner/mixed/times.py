"""Layer times for any number of samples, interpolated between profiled microbatches."""

import operator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mstrain.hardware.layer_profiles import Key, Profile


@dataclass(frozen=True)
class Times:
    """Times of one device type at one tensor-parallel degree, for m = 0 ... M samples; non-decreasing in m.

    They are piecewise linear between the profiled batches. Fewer samples than the smallest profiled batch take as long
    as that batch; M is at most the largest profiled batch; 0 samples take 0 ms.
    """

    layer_ms: np.ndarray  # (M + 1, L)
    sync_ms: np.ndarray  # (M + 1,) forward and backward time that belongs to no layer, charged to the last stage
    optimizer_ms: float  # update of the whole model, from the profile of the smallest batch
    generator_ms: float  # batch generator, from the profile of the smallest batch

    @cached_property
    def total_ms(self) -> np.ndarray:
        """(M + 1,) sums over all layers."""
        return self.layer_ms.sum(axis=1)

    @cached_property
    def prefix_ms(self) -> np.ndarray:
        """(M + 1, L + 1) sums over the first 0, 1, ... L layers."""
        return prefix_sums(self.layer_ms)


def prefix_sums(values: np.ndarray) -> np.ndarray:
    """Sums over the first 0, 1, ... entries of the last dim."""
    return np.concatenate([np.zeros_like(values[..., :1]), np.cumsum(values, axis=-1)], axis=-1)


def interpolate(profiles: dict[Key, Profile], device_type: str, tp: int, largest: int) -> Times:
    """Times for 0 to `largest` samples, or to the largest profiled batch if that is smaller."""
    batches = sorted(batch for name, degree, batch in profiles if (name, degree) == (device_type, tp))
    rows = [profiles[device_type, tp, batch] for batch in batches]
    samples = np.arange(1, min(largest, batches[-1]) + 1)
    columns = np.array([(*row.layer_ms, max(row.sync_ms, 0.0)) for row in rows], np.float64).T
    found = np.maximum.accumulate(np.stack([np.interp(samples, batches, column) for column in columns], axis=1))
    found = np.concatenate([np.zeros_like(found[:1]), found])
    return Times(found[:, :-1], found[:, -1], float(rows[0].optimizer_ms), float(rows[0].batch_generator_ms))


def filled_in(profiles: dict[Key, Profile]) -> list[str]:
    """One line for each type and degree without a profile of every batch, with the times used instead."""
    every, lines = {batch for _, _, batch in profiles}, []
    for name, tp in sorted({key[:2] for key in profiles}):
        mine = {batch for other, degree, batch in profiles if (other, degree) == (name, tp)}
        least, most = min(mine), max(mine)
        gaps = (
            ([batch for batch in every - mine if least < batch < most], "interpolated"),
            ([batch for batch in every if batch < least], f"taken as long as batch {least}"),
            ([batch for batch in every if batch > most], "not planned"),
        )
        parts = [f"batch {' '.join(map(str, sorted(batches)))} {instead}" for batches, instead in gaps if batches]
        if parts:
            lines.append(f"profiles missing for {name} tp {tp}: {', '.join(parts)}")
    return lines


def degrees_of(profiles: dict[Key, Profile], device_type: str, max_tp: int = 0) -> set[int]:
    """The tensor-parallel degrees with a profile of `device_type`, up to `max_tp` unless it is 0."""
    return {tp for name, tp, _ in profiles if name == device_type and (max_tp == 0 or tp <= max_tp)}


def share_samples(totals: list[np.ndarray], replicas: list[int], samples: int) -> list[int] | None:
    """Samples per replica of each kind that minimize the time of the slowest replica; None if profiles have too few.

    `totals[k][m]` is the time of m samples on kind k, non-decreasing in m; kind k has `replicas[k]` replicas. The
    minimum is one of these times: the earliest deadline by which the replicas can process all samples.
    """
    deadlines = np.sort(np.concatenate(totals))
    done = np.array([np.searchsorted(total, deadlines, side="right") - 1 for total in totals])
    enough = np.flatnonzero(np.array(replicas) @ done >= samples)
    if not len(enough):
        return None
    shares = done[:, enough[0]].tolist()
    for kind, count in enumerate(replicas):
        others = sum(map(operator.mul, replicas, shares)) - count * shares[kind]
        shares[kind] = max(0, min(shares[kind], -(-(samples - others) // count)))
    return shares
