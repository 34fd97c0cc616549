# pyright: strict
"""Code of a user of the library. pyright checks it strictly (.ci/check), so that all public functions have types."""

import jax
from flax import linen as nn

import mstrain


def products(x: jax.Array, w: jax.Array, mesh: jax.sharding.Mesh) -> jax.Array:
    y: jax.Array = mstrain.linear(x, w, mesh, "wang", dataflow="ls", slices=None)
    return mstrain.linear(y, w.T, mesh="2x4")


def layers(features: int) -> nn.Module:
    return mstrain.MeshDense(features, mesh="2x4", slices=2, use_bias=False)


def answers(run_dir: str) -> int:
    model, params = mstrain.load(run_dir, "mesh=2x4")
    return model.seq + len(params)


def loop(steps: int) -> float:
    state, step, feed = mstrain.trainer("model=tiny", f"steps={steps}")
    loss = 0.0
    for k in range(steps):
        state, metrics = step(state, feed(k))
        loss = float(metrics["loss"])
    return loss


def square(x: jax.Array) -> jax.Array:
    return x @ x


def seconds(x: jax.ShapeDtypeStruct) -> tuple[float, float, int]:
    mesh: jax.sharding.Mesh = mstrain.target_mesh("v5p-64", "4x8")
    schedule = mstrain.predict(square, x, target=f"v5p-{mesh.size}")
    return schedule.seconds, schedule.exposed, schedule.memory.peak
