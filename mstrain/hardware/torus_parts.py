"""How JAX places the axes of a mesh on a torus, including axes that are only a part of a torus axis."""

import itertools
import math
from functools import lru_cache
from typing import NamedTuple


class Part(NamedTuple):
    """The part of a torus axis that belongs to a mesh axis: `size` devices, `stride` apart.

    `axis` is the number of the torus axis. The devices in between belong to later axes of the mesh.
    """

    axis: int
    size: int
    stride: int


Parts = tuple[Part, ...]


@lru_cache(maxsize=4096)
def torus_axes(physical: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...] | None:
    """The numbers of the whole torus axes of which each mesh axis is the product; None if that is impossible.

    `physical` are the sizes of the torus axes, all of which are used, and `sizes` those of the mesh axes. As in
    `jax.experimental.mesh_utils`, the last mesh axis takes as many torus axes as it can, then the axis before it; of
    several such choices the first is taken.
    """
    found, several = [], [axis for axis, size in enumerate(sizes) if size > 1]
    for owners in itertools.product(several, repeat=len(physical)):
        made = tuple(tuple(n for n, owner in enumerate(owners) if owner == axis) for axis in range(len(sizes)))
        if all(math.prod(physical[n] for n in axes) == size for axes, size in zip(made, sizes)):
            found.append(made)
    return min(found, key=lambda made: [(-len(axes), axes) for axes in reversed(made)], default=None)


@lru_cache(maxsize=4096)
def torus_parts(physical: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[Parts, ...] | None:
    """The parts of torus axes of which each mesh axis consists; None if `sizes` cannot be placed on all devices.

    They are whole torus axes (`torus_axes`) if possible. Otherwise torus axes are split as in JAX, which places the
    last mesh axis first, on as many devices of whole torus axes as it can, and then prefers torus axes already in use.
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
    """Sort key of an assignment of torus axes to a mesh axis; `jax.experimental.mesh_utils` takes the largest."""
    whole = [part for part, size in zip(choice, physical) if part == size]
    in_use = math.prod(part for part, used in zip(choice, taken) if used > 1)
    return math.prod(whole), sum(part > 1 for part in whole), in_use, choice


def _divisors(size: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, size + 1) if size % n == 0)
