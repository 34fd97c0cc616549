"""Token (and learned position) embedding, sharded over vocabulary and features.

The table `E[vocab_size, width]` is sharded over (rows, columns). A lookup all-gathers it along the vocabulary, once per
microbatch, in the compute dtype. The backward pass sums the gradients of each token in float32 before the
reduce_scatter.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mstrain.gemm import Grid, Layout, Plan, Storage
from mstrain.gemm.local import all_gather
from mstrain.layers.parameter import parameter


class Embedding(nn.Module):
    """Looks up tokens_T (int32) and returns x_TxD in `dtype`, sharded as `grid.layout`.

    Attributes:
      grid: its rows shard the vocabulary, its columns the features.
      vocab_size, width: canonical table shape.
      padding: rows appended to the table so that shards are equal.
      initializer: initializer of the canonical table.
      dtype: dtype of the result.
    """

    grid: Grid
    vocab_size: int
    width: int
    padding: int
    initializer: Callable
    dtype: jnp.dtype

    def setup(self):
        storage = Storage((self.vocab_size, self.width), padding=(self.padding, 0) if self.padding else ())
        self.table = parameter(self, "table", self.initializer, storage, self.grid.weight_spec)

    def __call__(self, tokens_T):
        layout = self.grid.layout
        lookup = jax.shard_map(
            self._lookup,
            mesh=self.grid.mesh,
            in_specs=(P(layout.tokens), self.grid.weight_spec),
            out_specs=layout.spec,
            check_vma=False,
        )
        return lookup(tokens_T, self.table)

    def _lookup(self, tokens, table):
        table = all_gather(table.astype(self.dtype), self.grid.rows, 0)
        return table.astype(jnp.float32)[tokens].astype(self.dtype)

    def head_kernel(self, plan: Plan):
        """The table as the [width, vocab_size] kernel of a tied output projection computed by `plan`."""
        # The first constraint is that of the gradient: without it, XLA moves both moments of the optimizer instead.
        table = jax.lax.with_sharding_constraint(self.table, self.grid.sharding(self.grid.weight_spec))
        return jax.lax.with_sharding_constraint(table.T, plan.grid.sharding(plan.grid.weight_spec))


class Positions(nn.Module):
    """Adds a learned embedding of each token's position: `positions` is int32 [T], or a period of it."""

    layout: Layout
    mesh: Mesh
    context: int
    initializer: Callable

    @nn.compact
    def __call__(self, x_TxD, positions):
        features = self.layout.features or None
        storage = Storage((self.context, x_TxD.shape[-1]))
        table = parameter(self, "table", self.initializer, storage, P(None, features))
        add = jax.shard_map(
            lambda x, places, table: x + table.astype(x.dtype)[places],
            mesh=self.mesh,
            in_specs=(self.layout.spec, P(self.layout.tokens), P(None, features)),
            out_specs=self.layout.spec,
            check_vma=False,
        )
        return add(x_TxD, jnp.resize(positions, x_TxD.shape[0]), table)
