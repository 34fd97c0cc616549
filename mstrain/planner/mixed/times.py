"""Layer times for any number of samples, interpolated between profiled microbatches."""

import operator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mstrain.hardware.layer_profiles import Key, Profile


@dataclass(frozen=True)
class Times:
    """Times of one type at one tensor parallel degree, for m = 0 ... M samples; all non-decreasing in m.

    Piecewise linear between the profiled batches. Fewer samples than the smallest batch take as long as it, more than
    the largest are not possible, no samples take no time.
    """

    layer_ms: np.ndarray  # (M + 1, L)
    sync_ms: np.ndarray  # (M + 1,) forward and backward time of no layer, charged to the last stage
    optimizer_ms: float  # whole model at this degree, smallest batch
    generator_ms: float  # batch generator, smallest batch

    @cached_property
    def total_ms(self) -> np.ndarray:
        return self.layer_ms.sum(axis=1)

    @cached_property
    def prefix_ms(self) -> np.ndarray:
        """(M + 1, L + 1)"""
        return prefix_sums(self.layer_ms)


def prefix_sums(values: np.ndarray) -> np.ndarray:
    """Sums over the first 0, 1, ... entries of the last dim."""
    return np.concatenate([np.zeros_like(values[..., :1]), np.cumsum(values, axis=-1)], axis=-1)


def interpolate(profiles: dict[Key, Profile], device_type: str, tp: int, largest: int) -> Times:
    """Times for up to `largest` samples, or the largest profiled batch if that is smaller."""
    batches = sorted(batch for name, degree, batch in profiles if (name, degree) == (device_type, tp))
    rows = [profiles[device_type, tp, batch] for batch in batches]
    samples = np.arange(1, min(largest, batches[-1]) + 1)
    columns = np.array([(*row.layer_ms, max(row.sync_ms, 0.0)) for row in rows], np.float64).T
    found = np.maximum.accumulate(np.stack([np.interp(samples, batches, column) for column in columns], axis=1))
    found = np.concatenate([np.zeros_like(found[:1]), found])
    return Times(found[:, :-1], found[:, -1], float(rows[0].optimizer_ms), float(rows[0].batch_generator_ms))


def filled_in(profiles: dict[Key, Profile]) -> list[str]:
    """One line for each type and degree without all profiled batches, and the times used instead."""
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
    return {tp for name, tp, _ in profiles if name == device_type and (max_tp == 0 or tp <= max_tp)}


def share_samples(totals: list[np.ndarray], replicas: list[int], samples: int) -> list[int] | None:
    """Samples per replica of each kind so that the slowest finishes first; None when the profiles end before.

    `totals[k][m]` is the non-decreasing time of m samples. The best deadline is one of those times: by each
    deadline a replica can finish a known number; the earliest that is enough for all samples wins.
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
