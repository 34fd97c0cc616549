"""Measured times of local products by shape, interpolated for other shapes."""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class GemmTime:
    """Seconds of one product (m, k) x (k, n) on one device."""

    m: int
    k: int
    n: int
    seconds: float

    @property
    def rate(self) -> float:
        """FLOP/s."""
        return 2.0 * self.m * self.k * self.n / self.seconds


def gemm_seconds(times: tuple[GemmTime, ...], m: int, k: int, n: int) -> float:
    """Seconds of a product (m, k) x (k, n), interpolated between `times` on a full grid of shapes.

    The interpolation is linear in logarithms. Above the grid, a product has the rate of the largest size of the grid;
    below it, the time of the smallest.
    """
    edges, interpolate = _interpolator(times)
    inside = [min(max(size, edge[0]), edge[-1]) for size, edge in zip((m, k, n), edges)]
    beyond = math.prod(max(1.0, size / edge[-1]) for size, edge in zip((m, k, n), edges))
    return float(np.exp(interpolate(np.log(inside))[0])) * beyond


@functools.lru_cache(maxsize=8)
def _interpolator(times: tuple[GemmTime, ...]) -> tuple[list[list[int]], Callable]:
    from scipy.interpolate import RegularGridInterpolator  # here: a sixth of the import time of other runs

    seconds: dict[tuple[int, ...], float] = {(t.m, t.k, t.n): t.seconds for t in times}
    edges = [sorted({shape[axis] for shape in seconds}) for axis in range(3)]
    logs = np.log([seconds[shape] for shape in itertools.product(*edges)]).reshape([len(edge) for edge in edges])
    grid = []
    for axis, edge in enumerate(edges):
        grid.append(np.log(edge if len(edge) > 1 else [edge[0], 2 * edge[0]]))
        if len(edge) == 1:  # the interpolator needs two grid points
            logs = np.repeat(logs, 2, axis)
    return edges, RegularGridInterpolator(grid, logs)
