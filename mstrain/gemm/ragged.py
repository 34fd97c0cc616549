"""The two local products of sorted rows with the weights of groups, by what each platform computes well.

On TPUs `jax.lax.ragged_dot_general` compiles the first one to a kernel. For the second one the TPU compiler (libtpu
0.0.42) multiplies every row as part of every group; Megablox, which JAX ships, does not. On CPUs JAX does so for both.
There, sorted rows are cut into blocks of one group each, and one block after the other is multiplied. The last block of
a group also has rows of the next group: their results are overwritten by its own, or masked where they would be summed.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

LARGEST_BLOCK, SMALLEST_BLOCK = 256, 8  # rows
TILE = 512  # of a kernel, in each dim
LANES = 128  # of which rows of a tile are a multiple


def multiply(a_MxK, w, sizes_E, transposed: bool, platform: str) -> jax.Array:
    """The rows of each group times its weight [K, N], or with `transposed` times [N, K] transposed; float32 [M, N].

    Rows after those of all groups are undefined.
    """
    if platform == "cpu":
        return multiply_in_blocks(a_MxK, w, sizes_E, transposed)
    dims = lax.RaggedDotDimensionNumbers((((1,), (2 if transposed else 1,)), ((), ())), [0], [0])
    return lax.ragged_dot_general(a_MxK, w, sizes_E, dims, preferred_element_type=jnp.float32)


def sum_products(a_MxK, b_MxN, sizes_E, platform: str) -> jax.Array:
    """a^T b of the rows of each group, float32 [E, K, N]."""
    if platform == "cpu":
        return sum_in_blocks(a_MxK, b_MxN, sizes_E)
    if platform == "tpu":
        return sum_by_kernel(a_MxK, b_MxN, sizes_E)
    dims = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    return lax.ragged_dot_general(a_MxK, b_MxN, sizes_E, dims, preferred_element_type=jnp.float32)


def sum_by_kernel(a_MxK, b_MxN, sizes_E, interpret: bool = False) -> jax.Array:
    """`sum_products` by Megablox; `interpret` runs it where there is no TPU."""
    padding = -len(a_MxK) % LANES
    a, b = (jnp.pad(x, ((0, padding), (0, 0))) for x in (a_MxK, b_MxN))
    tile = math.gcd(len(a), TILE)
    return tgmm(a.T, b, sizes_E, jnp.float32, (tile, TILE, TILE), interpret=interpret)


def multiply_in_blocks(a_MxK, w, sizes_E, transposed: bool) -> jax.Array:
    """`multiply` block by block."""
    M, size = len(a_MxK), _block_size(len(a_MxK), len(sizes_E))
    contract = ((1,), (1 if transposed else 0,)), ((), ())
    padded = jnp.pad(a_MxK, ((0, size), (0, 0)))

    def step(y, block):
        group, start, _ = block
        part = lax.dynamic_slice_in_dim(padded, start, size)
        weight = lax.dynamic_index_in_dim(w, group, keepdims=False)
        product = lax.dot_general(part, weight, contract, preferred_element_type=jnp.float32)
        return lax.dynamic_update_slice_in_dim(y, product, start, 0), None

    y = jnp.zeros((M + size, w.shape[1 if transposed else 2]), jnp.float32)
    return lax.scan(step, y, _blocks(sizes_E, M, size))[0][:M]


def sum_in_blocks(a_MxK, b_MxN, sizes_E) -> jax.Array:
    """`sum_products` block by block."""
    M, size = len(a_MxK), _block_size(len(a_MxK), len(sizes_E))
    a, b = (jnp.pad(x, ((0, size), (0, 0))) for x in (a_MxK, b_MxN))

    def step(total, block):
        group, start, count = block
        rows = lax.dynamic_slice_in_dim(a, start, size)
        rows = jnp.where(jnp.arange(size)[:, None] < count, rows, 0)
        others = lax.dynamic_slice_in_dim(b, start, size)
        product = lax.dot_general(rows, others, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        own = lax.dynamic_index_in_dim(total, group, keepdims=False) + product
        return lax.dynamic_update_index_in_dim(total, own, group, 0), None

    zeros = jnp.zeros((len(sizes_E), a.shape[1], b.shape[1]), jnp.float32)
    return lax.scan(step, zeros, _blocks(sizes_E, M, size))[0]


def _block_size(rows: int, groups: int) -> int:
    """About half of the mean rows of a group: a group wastes half a block."""
    return min(max(rows // (2 * groups), SMALLEST_BLOCK), LARGEST_BLOCK)


def _blocks(sizes_E, rows: int, size: int):
    """(group, first row, rows of the group in it) of as many blocks as any sizes need, int32; those of no group have
    no rows and begin behind all."""
    counts = -(-sizes_E // size)
    ends, starts = jnp.cumsum(counts), jnp.cumsum(sizes_E) - sizes_E
    number = jnp.arange(rows // size + len(sizes_E), dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(ends, number, side="right"), len(sizes_E) - 1).astype(jnp.int32)
    within = (number - (ends - counts)[group]) * size
    used = number < ends[-1]
    first = jnp.where(used, starts[group] + within, rows).astype(jnp.int32)
    return group, first, jnp.where(used, jnp.clip(sizes_E[group] - within, 0, size), 0)
