"""How JAX places the axes of a mesh on a torus, where some axes take only a part of a torus axis."""

import itertools
import math
from functools import lru_cache
from typing import NamedTuple


class Part(NamedTuple):
    """The part of a torus axis in a mesh axis: `size` devices, every `stride`-th one.

    `axis` is the number of the torus axis. The devices in between belong to later axes of the mesh.
    """

    axis: int
    size: int
    stride: int


Parts = tuple[Part, ...]


@lru_cache(maxsize=4096)
def torus_axes(physical: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...] | None:
    """The numbers of the physical axes that each axis of a plan is the product of; None where that takes a part of one.

    Together they are all physical axes. As in `jax.experimental.mesh_utils`, the last axis takes the most physical axes
    that it can, the first of several such choices, then the axis before it.
    """
    found, several = [], [axis for axis, size in enumerate(sizes) if size > 1]
    for owners in itertools.product(several, repeat=len(physical)):
        made = tuple(tuple(n for n, owner in enumerate(owners) if owner == axis) for axis in range(len(sizes)))
        if all(math.prod(physical[n] for n in axes) == size for axes, size in zip(made, sizes)):
            found.append(made)
    return min(found, key=lambda made: [(-len(axes), axes) for axes in reversed(made)], default=None)


@lru_cache(maxsize=4096)
def torus_parts(physical: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[Parts, ...] | None:
    """The parts of torus axes that each axis of a mesh consists of: whole ones (`torus_axes`), or parts as JAX splits
    torus axes. JAX places the last mesh axis first, on as many devices of whole torus axes as it can, and then prefers
    torus axes that are in use already. None where `sizes` cannot be all devices.
    """
    if owned := torus_axes(physical, sizes):
        return tuple(tuple(Part(axis, physical[axis], 1) for axis in axes) for axes in owned)
    taken, found = [1] * len(physical), []
    for size in reversed(sizes):
        choices = [choice for choice in itertools.product(*map(_divisors, physical)) if math.prod(choice) == size]
        free = [c for c in choices if all(n % (part * used) == 0 for n, part, used in zip(physical, c, taken))]
        if not free:
            return None
        best = max(free, key=lambda choice: _preference(choice, physical, taken))
        found.append(tuple(Part(axis, part, taken[axis]) for axis, part in enumerate(best) if part > 1))
        taken = [used * part for used, part in zip(taken, best)]
    return tuple(reversed(found)) if tuple(taken) == physical else None


def _preference(choice: tuple[int, ...], physical: tuple[int, ...], taken: list[int]) -> tuple:
    """By which `jax.experimental.mesh_utils` prefers an assignment of torus axes to a mesh axis; the largest wins."""
    whole = [part for part, size in zip(choice, physical) if part == size]
    in_use = math.prod(part for part, used in zip(choice, taken) if used > 1)
    return math.prod(whole), sum(part > 1 for part in whole), in_use, choice


def _divisors(size: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, size + 1) if size % n == 0)
