"""Sharding of the training state over data-parallel replicas (ZeRO; Rajbhandari et al., 2020): values of `shard=`.

Every stage but `none` shards weights and moments over mesh axes `data`, `expert` and `context`, in addition to rows and
columns, on a dim of each tensor that divides; a tensor without one is replicated. The stages differ in when weights are
gathered and how gradients are summed:

* `optimizer` (ZeRO 1): weights are gathered once per step; gradients are summed by all_reduce.
* `gradients` (ZeRO 2): gradients are summed by reduce_scatter as soon as a layer has them.
* `parameters` (ZeRO 3): in addition, the kernels of a layer are gathered while the layer before computes
  (`mstrain.models.prefetch`). Norm scales and biases are small: one gather per step costs less than one per layer.

Gathered kernels have the compute dtype. Weights, moments and accumulated gradients are float32 shards.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from mstrain.gemm.copies import SHARED, data_dim, gathered_spec, shard_over_data, shared_axes
from mstrain.gemm.local import all_gather
from mstrain.layers.parameter import Stored

SHARD = ("none", "optimizer", "gradients", "parameters")


def check_shard(shard: str, mesh) -> None:
    """Raises ValueError if `shard` has no effect on `mesh`."""
    if shard != "none" and all(mesh.shape[axis] == 1 for axis in SHARED):
        raise ValueError(
            f"shard={shard} has no effect: the mesh has one data-parallel replica. Type shard=none, or a mesh= with a "
            "data axis, such as mesh=2x2x2 (data x rows x columns)."
        )


def sharded_box(box: Stored, mesh: Mesh) -> Stored:
    """`box` sharded over data-parallel replicas too, on a dim of its own and not that of stacked layers or experts."""
    shape = box.value.shape
    return box.replace(spec=shard_over_data(box.spec, shape, mesh, len(shape) - min(2, len(box.storage.shape))))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather(x, sharding: NamedSharding, dtype):
    """All-gathers float32 `x` over data-parallel replicas in `dtype`. The cotangent is constrained to `sharding`."""
    dim = data_dim(sharding.spec)
    if dim is None:
        return x.astype(dtype)
    local = jax.shard_map(
        lambda x: all_gather(x.astype(dtype), shared_axes(sharding.spec), dim),
        mesh=sharding.mesh,
        in_specs=sharding.spec,
        out_specs=gathered_spec(sharding.spec),
        check_vma=False,
    )
    return local(x)


def gather_parameter(path, x, sharding: NamedSharding, dtype):
    """`gather` of the parameter at `path`: kernels in `dtype`, others in float32."""
    return gather(x, sharding, dtype if is_kernel(path) else x.dtype)


def is_kernel(path) -> bool:
    return path[-1].key == "kernel"


def to_shard(gradient, sharding: NamedSharding):
    """A summed gradient as a float32 shard; no communication."""
    return jax.lax.with_sharding_constraint(gradient, sharding).astype(jnp.float32)


gather.defvjp(
    lambda x, sharding, dtype: (gather(x, sharding, dtype), None),
    lambda sharding, dtype, _, gradient: (to_shard(gradient, sharding),),
)
