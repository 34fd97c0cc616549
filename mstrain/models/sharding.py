"""Sharding of the training state over data-parallel copies (ZeRO; Rajbhandari et al., 2020), by the names of `shard=`.

`optimizer` (ZeRO 1) shards float32 weights and moments over mesh axis `data`, in addition to rows and columns, on a dim
of each tensor that divides; a tensor without one is replicated. Weights are gathered once per step.

Gathered kernels have the compute dtype. Weights, moments and accumulated gradients are float32 shards.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mstrain.gemm.local import all_gather
from mstrain.layers.parameter import Stored

SHARD = ("none", "optimizer")
AXIS = "data"


def check_shard(shard: str, mesh) -> None:
    """Raises ValueError if `shard` has no effect on `mesh`."""
    if shard != "none" and mesh.shape[AXIS] == 1:
        raise ValueError(
            f"shard={shard} has no effect: the mesh has one data-parallel copy. Type shard=none, or a mesh= with a "
            f"{AXIS} axis, such as mesh=2x2x2 (data x rows x columns)."
        )


def shard_over_data(box: Stored, mesh: Mesh) -> Stored:
    """`box` with axis `data` appended to the first own dim (not that of stacked layers) whose shards divide by it."""
    shape, spec = box.value.shape, list(box.spec)
    for dim in range(len(shape) - len(box.storage.shape), len(shape)):
        axes = _axes(spec[dim])
        shards = functools.reduce(lambda size, axis: size * mesh.shape[axis], axes, mesh.shape[AXIS])
        if shape[dim] % shards == 0:
            spec[dim] = (*axes, AXIS)
            return box.replace(spec=P(*spec))
    return box


def gathered_spec(spec: P) -> P:
    """`spec` without axis `data`."""
    return P(*(tuple(axis for axis in _axes(entry) if axis != AXIS) or None for entry in spec))


def data_dim(spec: P) -> int | None:
    """The dim that `spec` shards over axis `data`; None if there is none."""
    return next((dim for dim, entry in enumerate(spec) if AXIS in _axes(entry)), None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather(x, sharding: NamedSharding, dtype):
    """All-gathers float32 `x` over axis `data` in `dtype`. The cotangent is constrained to `sharding`, in float32."""
    dim = data_dim(sharding.spec)
    if dim is None:
        return x.astype(dtype)
    local = jax.shard_map(
        lambda x: all_gather(x.astype(dtype), (AXIS,), dim),
        mesh=sharding.mesh,
        in_specs=sharding.spec,
        out_specs=gathered_spec(sharding.spec),
        check_vma=False,
    )
    return local(x)


def to_shard(gradient, sharding: NamedSharding):
    """A summed gradient as a float32 shard; no communication."""
    return jax.lax.with_sharding_constraint(gradient, sharding).astype(jnp.float32)


gather.defvjp(
    lambda x, sharding, dtype: (gather(x, sharding, dtype), None),
    lambda sharding, dtype, _, gradient: (to_shard(gradient, sharding),),
)


def _axes(entry) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())
