"""Layer times for any number of samples, interpolated between profiled microbatches."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mstrain.planner.mixed.profiles import Key, Profile


@dataclass(frozen=True)
class Times:
    """Times of one type at one tensor parallel degree, for m = 0 ... M samples; all non-decreasing in m.

    Piecewise linear between the profiled batches; fewer samples than the smallest batch cost as much as
    it, more than the largest are not possible. No samples take no time.
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
    layer_rows = np.array([row.layer_ms for row in rows], np.float64)
    layers = np.stack([np.interp(samples, batches, column) for column in layer_rows.T], axis=1)
    sync = np.interp(samples, batches, [max(row.sync_ms, 0.0) for row in rows])
    layers, sync = np.maximum.accumulate(layers), np.maximum.accumulate(sync)
    return Times(
        np.concatenate([np.zeros_like(layers[:1]), layers]),
        np.concatenate([[0.0], sync]),
        float(rows[0].optimizer_ms),
        float(rows[0].batch_generator_ms),
    )


def filled_in(profiles: dict[Key, Profile]) -> list[str]:
    """One line for each type and degree that lacks batches which others have: what the planner takes instead."""
    every = {batch for _, _, batch in profiles}
    lines = []
    for name, tp in sorted({key[:2] for key in profiles}):
        mine = {batch for other, degree, batch in profiles if (other, degree) == (name, tp)}
        between = sorted(batch for batch in every - mine if min(mine) < batch < max(mine))
        below = sorted(batch for batch in every - mine if batch < min(mine))
        above = sorted(batch for batch in every - mine if batch > max(mine))
        parts = [f"batch {_list(between)} interpolated"] if between else []
        parts += [f"batch {_list(below)} taken as long as batch {min(mine)}"] if below else []
        parts += [f"batch {_list(above)} not planned"] if above else []
        if parts:
            lines.append(f"profiles missing for {name} tp {tp}: {', '.join(parts)}")
    return lines


def _list(batches: list[int]) -> str:
    return " ".join(map(str, batches))


def degrees_of(profiles: dict[Key, Profile], device_type: str, max_tp: int) -> set[int]:
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
    shares = [int(share) for share in done[:, enough[0]]]
    for kind in range(len(shares)):
        others = sum(replicas[k] * shares[k] for k in range(len(shares)) if k != kind)
        shares[kind] = max(0, min(shares[kind], -(-(samples - others) // replicas[kind])))
    return shares
