"""A dense layer for Flax models of one's own: ordinary parameters, products by an algorithm of tensor parallelism."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import AxisType, Mesh, NamedSharding

from mstrain.gemm.canonical import canonical_specs, multiply, plan_of, sharding_like


class MeshDense(nn.Module):
    """`y = x @ kernel + bias` in the place of `flax.linen.Dense`; in NNX by `flax.nnx.bridge.ToNNX`.

    Parameters are ordinary arrays: `kernel` [in, features] and `bias` [features] of `param_dtype`, with the mesh axes
    that shard them as metadata (`flax.linen.get_partition_spec`). Those of `flax.linen.Dense` may be used as they are.

    Attributes:
      features: output features.
      mesh: a mesh or its text, as in `mstrain.linear`.
      algorithm: as in `mstrain.linear`.
      use_bias: whether to add a bias.
      dataflow: as in `mstrain.linear`.
      slices: as in `mstrain.linear`.
      dtype: dtype of the product and of y; that of x by default.
      param_dtype: dtype of the parameters.
      kernel_init: initializer of the kernel.
      bias_init: initializer of the bias.

    `__call__` maps x [..., in] to y [..., features]. Raises ValueError as `mstrain.linear` does.
    """

    features: int
    mesh: Mesh | str
    algorithm: str = "meshslice"
    use_bias: bool = True
    dataflow: str = "os"
    slices: int | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable = nn.initializers.lecun_normal()
    bias_init: Callable = nn.initializers.zeros

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (x.shape[-1], self.features)
        plan = plan_of(shape, self.mesh, self.algorithm, self.dataflow, self.slices)
        of_kernel, of_bias = (sharding_like(x, spec, plan) for spec in canonical_specs(shape, plan))
        kernel = self.param("kernel", _sharded(self.kernel_init, of_kernel), shape, self.param_dtype)
        x = x.astype(self.dtype or x.dtype)
        y = multiply(x, kernel, self.mesh, self.algorithm, self.dataflow, self.slices)
        if self.use_bias:
            y = y + self.param("bias", _sharded(self.bias_init, of_bias), shape[1:], self.param_dtype).astype(y.dtype)
        return y


def _sharded(initializer: Callable, sharding: NamedSharding) -> Callable:
    """The initializer, its result with the mesh axes of `sharding` as metadata."""

    def init(*args):
        value = initializer(*args)
        return jax.sharding.reshard(value, sharding) if explicit else value

    explicit = AxisType.Explicit in sharding.mesh.axis_types
    known = explicit or not jax.sharding.get_abstract_mesh().empty  # Flax takes the mesh of jax.set_mesh
    mesh: Any = None if known else sharding.mesh
    return nn.with_partitioning(init, tuple(sharding.spec), mesh)
