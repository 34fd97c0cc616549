"""Fits launch, sync and bandwidth of a link to measured collectives.

The model is `mstrain.hardware.collective_seconds` for n devices in a ring:
launch + (n - 1) * (sync + shard bytes / bandwidth).
"""

import dataclasses

import numpy as np
from scipy.optimize import nnls

from mstrain.hardware import Link, collective_seconds


@dataclasses.dataclass(frozen=True)
class Sample:
    """Seconds of a collective of `participants` devices; `shard_bytes` as in `collective_seconds`."""

    axis: str
    collective: str
    participants: int
    shard_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Fit:
    """A link and the median relative error of its prediction. If not `separable`, launch is counted as sync."""

    link: Link
    error: float
    separable: bool


def fit_link(samples: list[Sample]) -> Fit:
    """The link with the least squares of relative errors and nonnegative constants.

    Launch and sync are separable only with groups of different sizes; otherwise launch is counted as sync, which
    predicts the same time for that size. Raises ValueError if the time does not grow with the size.
    """
    steps = np.array([sample.participants - 1 for sample in samples], float)
    megabytes = np.array([sample.shard_bytes for sample in samples]) / 1e6
    micros = np.array([sample.seconds for sample in samples]) * 1e6
    separable = len(set(steps.tolist())) > 1
    columns = np.stack([np.full(len(steps), float(separable)), steps, steps * megabytes], axis=1)
    (launch, sync, per_megabyte), _ = nnls(columns / micros[:, None], np.ones(len(samples)))
    if per_megabyte <= 0:
        raise ValueError(
            f"{samples[0].collective} on {samples[0].axis}: the time does not grow with the size, so no "
            "bandwidth can be fitted. Measure again on a quieter machine, or with a larger repeats=."
        )
    link = Link(launch / 1e6, sync / 1e6, 1e12 / per_megabyte)
    errors = [abs(collective_seconds(link, s.shard_bytes, s.participants) / s.seconds - 1) for s in samples]
    return Fit(link, float(np.median(errors)), separable)
