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

from mstrain.gemm import Grid, Layout, Plan, Span, Storage
from mstrain.gemm.local import all_gather
from mstrain.layers.parameter import parameter, unless_initializing


class Embedding(nn.Module):
    """Looks up tokens_T (int32) and returns x_TxD in `dtype`, sharded as `grid.layout`.

    Attributes:
      grid: its rows shard the vocabulary, its columns the features.
      vocabulary, width: rows and columns of the table.
      initializer: initializer of the canonical table.
      dtype: dtype of the result.
    """

    grid: Grid
    vocabulary: Span
    width: Span
    initializer: Callable
    dtype: jnp.dtype

    def setup(self):
        shape = (self.vocabulary.size, self.width.size)
        storage = Storage(shape, (self.width,), first=self.vocabulary)
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
        shape = len(tokens_T), self.width.stored
        return unless_initializing(self, lambda: lookup(tokens_T, self.table), shape, self.dtype)

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
    width: Span
    initializer: Callable

    @nn.compact
    def __call__(self, x_TxD, positions):
        features = self.layout.features or None
        storage = Storage((self.context, self.width.size), (self.width,))
        table = parameter(self, "table", self.initializer, storage, P(None, features))
        add = jax.shard_map(
            lambda x, places, table: x + table.astype(x.dtype)[places],
            mesh=self.mesh,
            in_specs=(self.layout.spec, P(self.layout.tokens), P(None, features)),
            out_specs=self.layout.spec,
            check_vma=False,
        )
        places_T = jnp.resize(positions, x_TxD.shape[0])
        return unless_initializing(self, lambda: add(x_TxD, places_T, table), x_TxD.shape, x_TxD.dtype)
