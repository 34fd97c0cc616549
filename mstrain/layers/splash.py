"""JAX's splash attention kernel for TPUs."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.extend.core import JaxprEqn

from mstrain.gemm.tiles import LANES, SUBLANES
from mstrain.layers.equations import evaluate


def splash_kernel(tokens: int, heads: int, width: int, causal: bool, local: int | None = None, **options) -> Any:
    """The kernel of one sequence: q [heads, tokens, width], k, v [K, tokens, width]; skips what the mask removes.

    `local`: tokens attend to as many past ones only, themselves included; None for all.
    `options` as of `splash.make_splash_mha`.
    """
    widest = 1024 if width <= 128 else 512  # VMEM holds smaller blocks of wider heads
    block = next(b for b in (1024, 512, 256, 128) if b <= widest and tokens % b == 0)
    sizes = splash.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=min(block, 512),
        block_q_dkv=block, block_kv_dkv=block, block_kv_dkv_compute=min(block, 512),
        use_fused_bwd_kernel=True,
    )  # fmt: skip
    shape = tokens, tokens
    mask = masks.CausalMask(shape) if causal else masks.FullMask(shape)
    if local is not None:
        mask = masks.LocalMask(shape, (local - 1, 0), 0)
    return splash.make_splash_mha(
        masks.MultiHeadMask([mask] * heads), block_sizes=sizes, head_shards=1, q_seq_shards=1, **options
    )


_BY_TILES = Layout(major_to_minor=(0, 1, 3, 2, 4))


def heads_first(x_BxTxNxH):
    """x as [B, N, T, H], in one pass over a TPU's memory where tokens and features are whole tiles.

    Features [T, N x H] are stored in tiles of 8 x 128, and so is [T / 8, 8, N, H] in the order of `_BY_TILES`, of which
    tiles only change places. A plain transpose passes twice, through an array in which the tokens of a tile are far
    apart.
    """
    B, T, N, H = x_BxTxNxH.shape
    if not _whole_tiles(T, H):
        return x_BxTxNxH.swapaxes(1, 2)
    tiles = with_layout_constraint(x_BxTxNxH.reshape(B, T // SUBLANES, SUBLANES, N, H), _BY_TILES)
    return tiles.transpose(0, 3, 1, 2, 4).reshape(B, N, T, H)


def tokens_first(y_BxNxTxH):
    """The inverse of `heads_first`."""
    B, N, T, H = y_BxNxTxH.shape
    if not _whole_tiles(T, H):
        return y_BxNxTxH.swapaxes(1, 2)
    tiles = y_BxNxTxH.reshape(B, N, T // SUBLANES, SUBLANES, H).transpose(0, 2, 3, 1, 4)
    return with_layout_constraint(tiles, _BY_TILES).reshape(B, T, N, H)


def _whole_tiles(tokens: int, width: int) -> bool:
    return tokens % SUBLANES == 0 and width % LANES == 0


@jax.custom_vjp
def attend_by(kernel: Any, q, k, v, segments, sinks) -> jax.Array:
    """`kernel`, one of `splash_kernel`, of every sequence [B, heads, tokens, width]; `sinks` are those of all.

    Gradients of q by blocks of keys are added one after the other. JAX adds them by a sum over a dim in front, for
    which XLA's estimates on TPUs are ten times those of additions.
    """
    return _of_sequences(kernel, q, k, v, segments, sinks)


def _of_sequences(kernel, q, k, v, segments, sinks):
    return jax.vmap(kernel, in_axes=(0, 0, 0, 0, None))(q, k, v, segments, sinks)


def _forward(kernel, q, k, v, segments, sinks):
    return jax.vjp(lambda q, k, v, sinks: _of_sequences(kernel, q, k, v, segments, sinks), q, k, v, sinks)


def _backward(back, dy):
    closed, shapes = jax.make_jaxpr(back, return_shape=True)(dy)
    slopes = evaluate(closed.jaxpr, closed.consts, [dy], rule=_added())
    dq, dk, dv, d_sinks = jax.tree.unflatten(jax.tree.structure(shapes), slopes)
    return None, dq, dk, dv, None, d_sinks


attend_by.defvjp(_forward, _backward)


def _added() -> Callable:
    """A rule of `evaluate`: a sum over one of the front dims becomes additions.

    Parts are cut out before they are converted: XLA would store a conversion that several additions read.
    """
    narrow = {}  # what a value was converted from

    def rule(equation: JaxprEqn, read: Callable):
        name, axes = equation.primitive.name, equation.params.get("axes", ())
        if name == "convert_element_type":
            narrow[equation.outvars[0]] = equation.invars[0]
        if name != "reduce_sum":
            return None
        (value,) = equation.invars
        made: Any = value.aval
        if len(axes) != 1 or axes[0] >= made.ndim - 2:
            return None
        parts = read(narrow.get(value, value))
        each = (lax.index_in_dim(parts, i, axes[0], keepdims=False) for i in range(parts.shape[axes[0]]))
        return [functools.reduce(lax.add, (part.astype(made.dtype) for part in each))]

    return rule
