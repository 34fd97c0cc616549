"""The mesh axes that form the rows and the columns of a product.

A two-dimensional algorithm uses mesh axis `row` for rows and `col` for columns. The one-dimensional algorithms are
special cases: with every device in one row (1 x n) the W-stationary dataflow is Megatron tensor parallelism with
sequence parallelism, and with every device in one column (n x 1) the Y-stationary dataflow is fully sharded data
parallelism. `Grid` holds the axes, so plans and layers have no case for either.
"""

import dataclasses

from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mstrain.gemm.copies import COPIES, EXPERT, shard_over_data
from mstrain.mesh import platform_of


@dataclasses.dataclass(frozen=True)
class Layout:
    """The sharding of an activation `x_TxD`: the mesh axes that shard its tokens and its features."""

    tokens: tuple[str, ...]
    features: tuple[str, ...]

    @property
    def spec(self) -> P:
        return P(self.tokens or None, self.features or None)


@dataclasses.dataclass(frozen=True)
class Grid:
    """Mesh axes used as rows and as columns of a product; either may be empty.

    `scatter`: whether gradients of weights are summed over data-parallel replicas by reduce_scatter where they divide.
    """

    mesh: Mesh | AbstractMesh
    rows: tuple[str, ...]
    cols: tuple[str, ...]
    scatter: bool = False

    @property
    def num_rows(self) -> int:
        return self.size(self.rows)

    @property
    def num_cols(self) -> int:
        return self.size(self.cols)

    @property
    def swapped(self) -> "Grid":
        """The same grid with the mesh axes of rows and columns exchanged (MeshSlice paper, Table 1)."""
        return dataclasses.replace(self, rows=self.cols, cols=self.rows)

    @property
    def copies(self) -> tuple[str, ...]:
        """The mesh axes of data-parallel replicas."""
        return tuple(axis for axis in COPIES if axis in self.mesh.shape)

    @property
    def platform(self) -> str:
        """JAX's name of the devices' platform: cpu, gpu or tpu."""
        return platform_of(self.mesh)

    @property
    def layout(self) -> Layout:
        """Activations with tokens over (copies, rows) and features over columns."""
        return Layout((*self.copies, *self.rows), self.cols)

    @property
    def weight_spec(self) -> P:
        return P(self.rows or None, self.cols or None)

    def spec_of(self, shape: tuple[int, ...]) -> P:
        """The sharding of a weight [in, out], or of those of several experts [E, in, out]."""
        return self.weight_spec if len(shape) == 2 else P(EXPERT if self.expert_parts > 1 else None, *self.weight_spec)

    @property
    def expert_parts(self) -> int:
        """Devices among which experts are divided."""
        return self.mesh.shape.get(EXPERT, 1)

    def gradient_spec(self, shape: tuple[int, ...]) -> P:
        """The sharding of the gradient of a weight of this shape."""
        spec = self.spec_of(shape)
        return shard_over_data(spec, shape, self.mesh, len(shape) - 2) if self.scatter else spec

    def size(self, axes: tuple[str, ...]) -> int:
        size = 1
        for axis in axes:
            size *= self.mesh.shape[axis]
        return size

    def sharding(self, spec: P) -> NamedSharding:
        return NamedSharding(self.mesh, spec)
