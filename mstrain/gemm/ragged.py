"""The two local products of sorted rows with the weights of groups, by what each platform computes well.

On TPUs both are Megablox, which JAX ships: kernels that visit the tiles of rows that have a group, and a tile of two
groups twice. `tile_of` chooses tiles such that a kernel is not limited by what it reads again. On GPUs both are
`jax.lax.ragged_dot_general`. On CPUs JAX multiplies every row as part of every group; there, sorted rows are cut into
blocks of one group each, and one block after the other is multiplied. The last block of a group also has rows of the
next group: their results are overwritten by its own, or masked where they would be summed.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from mstrain.gemm.tiles import LANES, largest_tile

LARGEST_BLOCK, SMALLEST_BLOCK = 256, 8  # rows
TILE_ROWS = 512  # of a kernel; a group wastes half a tile
WHOLE = 4096  # features of a product that one tile holds; then a kernel reads the weight of a group once


def multiply(a_MxK, w, sizes_E, transposed: bool, platform: str, dtype=jnp.float32) -> jax.Array:
    """The rows of each group times its weight [K, N], or with `transposed` times [N, K] transposed; [M, N].

    Sums are float32. Rows after those of all groups are undefined.
    """
    if platform == "cpu":
        return multiply_in_blocks(a_MxK, w, sizes_E, transposed).astype(dtype)
    if platform == "tpu":
        return multiply_by_kernel(a_MxK, w, sizes_E, transposed, dtype)
    dims = lax.RaggedDotDimensionNumbers((((1,), (2 if transposed else 1,)), ((), ())), [0], [0])
    return lax.ragged_dot_general(a_MxK, w, sizes_E, dims, preferred_element_type=jnp.float32).astype(dtype)


def sum_products(a_MxK, b_MxN, sizes_E, platform: str, dtype=jnp.float32) -> jax.Array:
    """a^T b of the rows of each group, [E, K, N]; sums are float32."""
    if platform == "cpu":
        return sum_in_blocks(a_MxK, b_MxN, sizes_E).astype(dtype)
    if platform == "tpu":
        return sum_by_kernel(a_MxK, b_MxN, sizes_E, dtype)
    dims = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    return lax.ragged_dot_general(a_MxK, b_MxN, sizes_E, dims, preferred_element_type=jnp.float32).astype(dtype)


def multiply_by_kernel(a_MxK, w, sizes_E, transposed: bool, dtype=jnp.float32, interpret: bool = False) -> jax.Array:
    """`multiply` by Megablox; `interpret` runs it on other platforms than TPUs."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm  # here, because it imports Pallas

    (a,), rows = _padded(a_MxK), len(a_MxK)
    tile = tile_of(len(a), a.shape[1], w.shape[1 if transposed else 2])
    return gmm(a, w, sizes_E, dtype, tile, transpose_rhs=transposed, interpret=interpret)[:rows]


def sum_by_kernel(a_MxK, b_MxN, sizes_E, dtype=jnp.float32, interpret: bool = False) -> jax.Array:
    """`sum_products` by Megablox; `interpret` runs it on other platforms than TPUs."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm  # here, because it imports Pallas

    a, b = _padded(a_MxK, b_MxN)
    tile = tile_of_sum(len(a), a.shape[1], b.shape[1])
    return tgmm(a.T, b, sizes_E, dtype, tile, interpret=interpret)


def _padded(*arrays) -> list[jax.Array]:
    return [jnp.pad(x, ((0, -len(x) % LANES), (0, 0))) for x in arrays]


def tile_of(M: int, K: int, N: int) -> tuple[int, int, int]:
    """(rows, summed features, columns) of a tile of `multiply_by_kernel`.

    With whole rows of `a` in a tile, the weight of a group stays on the chip while its rows pass; wide tiles read `a`
    few times otherwise.
    """
    rows = _rows_of_tile(M)
    if K <= WHOLE:
        return rows, K, _features_of_tile(N, 1024)
    return rows, _features_of_tile(K, 1024), _features_of_tile(N, WHOLE)


def tile_of_sum(M: int, K: int, N: int) -> tuple[int, int, int]:
    """(rows, features of a, features of b) of a tile of `sum_by_kernel`."""
    return _rows_of_tile(M), _features_of_tile(K, 2048), _features_of_tile(N, 1024)


def visits_of(
    M: int, K: int, N: int, groups: int, summed: bool, tile: tuple[int, int, int] | None = None
) -> tuple[int, float]:
    """(rows that a kernel multiplies, values that it reads and writes) for M rows that have a group.

    `summed`: of `sum_by_kernel`, else of `multiply_by_kernel`. A tile of several groups is multiplied for each of them.
    A tile of `a` is read once for every column of tiles. A weight is read once for every tile of rows, or for every
    group where tiles have whole rows.
    """
    rows, first, columns = tile or (tile_of_sum if summed else tile_of)(M, K, N)
    visited = math.ceil(M / rows) + groups - 1
    again = math.ceil(N / columns)
    if summed:
        return visited * rows, M * K * again + M * N * math.ceil(K / first) + groups * K * N
    return visited * rows, M * K * again + (groups if first >= K else visited) * K * N + M * N


def _rows_of_tile(M: int) -> int:
    return largest_tile(M + -M % LANES, TILE_ROWS)


def _features_of_tile(size: int, most: int) -> int:
    """The largest tile up to `most` that is wider than `LANES`; if none divides `size`, the last tile is cut."""
    tile = largest_tile(size, most) if size % LANES == 0 else LANES
    return tile if tile > LANES else min(size, most)


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
