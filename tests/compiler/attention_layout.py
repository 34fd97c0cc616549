"""Compares two ways to bring heads into the order of splash attention on a TPU: plain transposes and `Rotary.rotate`,
or `mstrain.layers.splash.heads_first` and `Rotary.rotate_heads`.

    python -m tests.compiler.attention_layout v6e-32 4x8

Prints the predicted time of the attention half of a block, with its projections, forward and backward, for two
sequences of 2,048 tokens with 24 heads of 128 features per device. No TPU is needed.
"""

import functools
import sys

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mstrain.compiler.function import predict_function, target_mesh
from mstrain.layers.rotary import GLOBAL, Rotary
from mstrain.layers.splash import attend_by, heads_first, splash_kernel, tokens_first

SEQUENCES, TOKENS, HEADS, HEAD_DIM = 2, 2048, 24, 128
WIDTH = HEADS * HEAD_DIM


def half(x_TxD, into, out, rotary: Rotary | None, by_tiles: bool):
    """The attention half of a block on one device."""
    positions = jnp.arange(TOKENS)
    q, k, v = (part.reshape(SEQUENCES, TOKENS, HEADS, HEAD_DIM) for part in jnp.split(jnp.dot(x_TxD, into), 3, axis=1))
    if rotary and not by_tiles:
        q, k = (rotary.rotate(part, GLOBAL, positions) for part in (q, k))
    q, k, v = (heads_first(part) if by_tiles else part.swapaxes(1, 2) for part in (q * HEAD_DIM**-0.5, k, v))
    if rotary and by_tiles:
        q, k = (rotary.rotate_heads(part, GLOBAL, positions) for part in (q, k))
    y = attend_by(splash_kernel(TOKENS, HEADS, HEAD_DIM, causal=True), q, k, v, None, None)
    return jnp.dot((tokens_first(y) if by_tiles else y.swapaxes(1, 2)).reshape(-1, WIDTH), out)


def microseconds(target: str, mesh_text: str, rotary: Rotary | None, by_tiles: bool) -> float:
    """Predicted microseconds of the forward and the backward pass."""
    mesh = target_mesh(target, mesh_text)
    axes = tuple(mesh.shape)

    def passes(x, into, out, dy):
        y, back = jax.vjp(functools.partial(half, rotary=rotary, by_tiles=by_tiles), x, into, out)
        return y, *back(dy)

    local = jax.shard_map(
        passes, mesh=mesh, in_specs=(P(axes), P(), P(), P(axes)), out_specs=(P(axes), P(axes), P(), P()),
        check_vma=False,
    )  # fmt: skip

    def argument(rows: int, columns: int, spec: P):
        return jax.ShapeDtypeStruct((rows, columns), jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    tokens = argument(mesh.devices.size * SEQUENCES * TOKENS, WIDTH, P(axes))
    weights = argument(WIDTH, 3 * WIDTH, P()), argument(WIDTH, WIDTH, P())
    return 1e6 * predict_function(local, (tokens, *weights, tokens), target).seconds


def main(target: str, mesh: str) -> None:
    for name, rotary in (("without rotary", None), ("with rotary", Rotary(1e4))):
        before, after = (microseconds(target, mesh, rotary, by_tiles) for by_tiles in (False, True))
        print(f"{target}, {name}: transposes {before:.0f} us, tiles {after:.0f} us", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
