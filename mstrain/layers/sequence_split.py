"""Sequences split over devices: which tokens each device has.

With P parts a sequence is 2 P chunks of equal length, and part p has chunks p and 2 P - 1 - p. Every part then has as
many causal scores as the others (Llama 3; Grattafiori et al., 2024, section 3.3.2).
"""

import dataclasses

import jax.numpy as jnp
from jax import lax

from mstrain.gemm.local import all_gather, axis_index


@dataclasses.dataclass(frozen=True)
class SequenceSplit:
    """Every sequence is split into `parts`, one for each device along the mesh `axes`.

    Methods are called inside `jax.shard_map`.

    Attributes:
      exchange: how devices get the keys and values of other parts: `gather` all at once, or in a `ring`.
    """

    axes: tuple[str, ...] = ()
    parts: int = 1
    exchange: str = "gather"

    def places(self, seq: int):
        """Places in the sequence of `seq` tokens of those of this device, int32 [seq / parts]."""
        return self.own(jnp.arange(seq, dtype=jnp.int32), 0)

    def own(self, x, dim: int):
        """This device's part of `x`, which has whole sequences along `dim`."""
        return take_part(x, dim, axis_index(self.axes), self.parts)

    def gather(self, x, dim: int):
        """Whole sequences along `dim`, from the part of each device."""
        if self.parts == 1:
            return x
        shape = x.shape
        parts = all_gather(x, self.axes, dim).reshape(*shape[:dim], self.parts, 2, -1, *shape[dim + 1 :])
        first, second = (lax.index_in_dim(parts, half, dim + 1, keepdims=False) for half in (0, 1))
        whole = jnp.concatenate([first, jnp.flip(second, dim)], axis=dim)
        return whole.reshape(*shape[:dim], self.parts * shape[dim], *shape[dim + 1 :])


def take_part(x, dim: int, part, parts: int):
    """The chunks of `part` (a traced int) of `x`, which has whole sequences along `dim`."""
    if parts == 1:
        return x
    chunk = x.shape[dim] // (2 * parts)
    begins = part * chunk, (2 * parts - 1 - part) * chunk
    return jnp.concatenate([lax.dynamic_slice_in_dim(x, begin, chunk, dim) for begin in begins], axis=dim)
