"""The layers of all stages of a pipeline, computed side by side: one `vmap` over the stages.

Activations are x_PxTxD: the microbatches that the P stages compute at one time, sharded over mesh axis `stage`. Every
stage runs the same program on its own rows of parameters, so any algorithm of tensor parallelism works within a stage.

With `shard=parameters`, every pass gathers the weights of a layer while it computes the layer before, as
`mstrain.models.prefetch` does without stages; the first layer of a pass waits for its own.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mstrain.gemm.local import axis_index, ppermute
from mstrain.layers.rotary import GLOBAL
from mstrain.models.config import ModelConfig
from mstrain.models.halves import halve
from mstrain.models.plan import BlockPlan, ModelPlan
from mstrain.models.prefetch import gather_layer, join, layer_shardings, split
from mstrain.models.sharding import is_kernel
from mstrain.models.stages import AXIS, Stages


@dataclasses.dataclass(frozen=True)
class StageLayers:
    """The layers of a pipeline: `block(x_TxD, window, segments_T)` is one layer without parent.

    Parameters are stacks of rows [P x V x L, ...] as `Stages.rows`: P stages of V chunks of L rows.
    """

    block: nn.Module
    model: ModelConfig
    plan: ModelPlan
    trees: dict[str, Any] = dataclasses.field(default_factory=dict)  # of what a layer saves; `forward` is traced first

    @property
    def stages(self) -> Stages:
        stages = self.plan.stages
        assert stages
        return stages

    @property
    def spec(self) -> P:
        """Of x_PxTxD."""
        block: BlockPlan = self.plan.groups[0][0]
        return P(AXIS, *block.attention.residual.spec)

    def constrain(self, x_PxTxD):
        return lax.with_sharding_constraint(x_PxTxD, NamedSharding(self.plan.mesh, self.spec))

    def split_rows(self, stack):
        """[P x V x L, ...] as [P, V, L, ...]."""
        stages = self.stages
        return jax.tree.map(lambda x: x.reshape(stages.count, stages.chunks, stages.deepest, *x.shape[1:]), stack)

    def forward(self, rows, x_PxTxD, segments_PxT, chunk_P):
        """(y_PxTxD, what `backward` needs) of chunk `chunk_P` of every stage; `rows` are from `split_rows`."""

        def advance(segments, x, row):
            weights, known = row[0], (row, segments)
            y, pullback = jax.vjp(lambda weights, x: self._apply((weights, *row[1:]), x, segments), weights, x)
            saved, self.trees["pullback"] = split(pullback, known)
            return y, saved

        return self._scan(advance, rows, x_PxTxD, segments_PxT, chunk_P)

    def backward(self, rows, saved, dy_PxTxD, segments_PxT, chunk_P):
        """(dx_PxTxD, gradients of the rows of chunk `chunk_P` [P, L, ...]) from what `forward` saved."""

        def advance(segments, dy, row):
            *row, saved = row
            dw, dx = join(self.trees["pullback"], saved, (tuple(row), segments))(dy)
            return dx, dw

        return self._scan(advance, rows, dy_PxTxD, segments_PxT, chunk_P, saved)

    def backward_of_inputs(self, rows, saved, dy_PxTxD, segments_PxT, chunk_P):
        """(dx_PxTxD, gradients of the rows but None for kernels, what `backward_of_kernels` needs besides `saved`)."""

        def advance(segments, dy, row):
            *row, saved = row
            known = saved, (tuple(row), segments)
            halves = self.trees["halves"] = halve(self._gradients, known, dy)
            (dx, gradients), rest = halves.early(known, dy)
            return dx, (gradients, rest)

        dx_PxTxD, (gradients, rest) = self._scan(advance, rows, dy_PxTxD, segments_PxT, chunk_P, saved)
        return dx_PxTxD, gradients, rest

    def backward_of_kernels(self, rows, saved, rest, segments_PxT, chunk_P):
        """Gradients of the kernels of the rows [P, L, ...], None for all others."""

        def advance(segments, nothing, row):
            *row, (saved, rest) = row
            return nothing, self.trees["halves"].late((saved, (tuple(row), segments)), rest)

        return self._scan(advance, rows, None, segments_PxT, chunk_P, (saved, rest))[1]

    def _gradients(self, known, dy):
        """((dx, gradients of all weights but kernels), those of kernels); None in the place of the others."""
        dw, dx = join(self.trees["pullback"], *known)(dy)

        def only(kernels: bool):
            return jax.tree_util.tree_map_with_path(lambda path, x: x if is_kernel(path) == kernels else None, dw)

        return (dx, only(False)), only(True)

    def one_by_one(self, stack, x_TxD, segments_T):
        """x_TxD after all layers, chunk by chunk: all stages compute each chunk, and the result of one stage is
        used."""
        stages, rows = self.stages, self.split_rows(stack)
        segments = None if segments_T is None else jnp.broadcast_to(segments_T, (stages.count, *segments_T.shape))

        def advance(x_PxTxD, chunk):
            y_PxTxD, _ = self._scan(
                lambda segments, x, row: (self._apply(row, x, segments), None),
                rows, x_PxTxD, segments, jnp.full(stages.count, chunk),
            )  # fmt: skip
            return self.shift(y_PxTxD, 1), None

        x_PxTxD = self.constrain(jnp.broadcast_to(x_TxD, (stages.count, *x_TxD.shape)))
        chunks = np.arange(len(stages.layers)) // stages.count
        return self.of_stage(lax.scan(advance, x_PxTxD, chunks)[0], 0)

    def shift(self, x_PxTxD, by: int):
        """Sends the activations of every stage to the stage `by` later, in a ring."""
        return self._local(lambda x: ppermute(x, (AXIS,), by), self.spec)(x_PxTxD)

    def of_stage(self, x_PxTxD, stage: int):
        """x_TxD of one stage, on all of them."""

        def pick(x):
            return lax.psum(jnp.where(axis_index((AXIS,)) == stage, x[0], 0), AXIS)

        return self._local(pick, P(*self.spec[1:]))(x_PxTxD)

    def _local(self, function: Callable, out_spec: P):
        return jax.shard_map(function, mesh=self.plan.mesh, in_specs=self.spec, out_specs=out_spec, check_vma=False)

    def _scan(self, advance, rows, x_PxTxD, segments_PxT, chunk_P, saved=None):
        """Scans `advance(segments, x, row)` over the rows of one chunk of each stage, backward if they `saved`."""

        def of_stage(rows, x, segments, chunk, saved):
            weights, *rest = jax.tree.map(
                lambda x: lax.dynamic_index_in_dim(x, chunk, keepdims=False) if x.shape[0] > 1 else x[0], rows
            )
            reverse = saved is not None
            rest, one = ((*rest, saved) if reverse else rest), functools.partial(advance, segments)
            if self.plan.shard != "parameters":
                return lax.scan(one, x, (weights, *rest), reverse=reverse)
            return self._scan_gathering(one, weights, x, rest, reverse)

        windows, real = self._windows()
        if self.plan.shard == "parameters" and x_PxTxD is not None:
            x, segments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), (x_PxTxD, segments_PxT))
            one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), rows)
            shardings = layer_shardings(self.block, self.plan.groups[0][0], one, x, windows[0, 0, 0], segments)
            self.trees["gathered"] = {"shardings": shardings, "dtype": x.dtype}
        mapped = jax.vmap(of_stage, spmd_axis_name=AXIS)
        x_PxTxD = jax.tree.map(self.constrain, x_PxTxD)  # None for a scan without activations
        x_PxTxD, ys = mapped((rows, windows, real), x_PxTxD, segments_PxT, chunk_P, saved)
        return jax.tree.map(self.constrain, x_PxTxD), ys

    def _scan_gathering(self, advance, weights, x, rest, reverse: bool):
        """`lax.scan` of `advance` over (weights, *rest), whose weights an iteration gathers for the next one."""
        last, how = self.stages.deepest - 1, self.trees["gathered"]

        def gathered(i):
            return gather_layer(weights, i=i, **how)

        if x is None:  # gradients of kernels read no kernel: the compiler removes these gathers
            return lax.scan(
                lambda x, row: advance(x, (gathered(row[0]), *row[1:])),
                x,
                (jnp.arange(last + 1), *rest),
                reverse=reverse,
            )

        def ahead(carry, row):
            (x, own), (i, *row) = carry, row
            following = gathered(jnp.clip(i + (-1 if reverse else 1), 0, last))
            x, y = advance(x, (own, *row))
            return (x, following), y

        carry = x, gathered(last if reverse else 0)
        (x, _), ys = lax.scan(ahead, carry, (jnp.arange(last + 1), *rest), reverse=reverse)
        return x, ys

    def _windows(self):
        """The window of every row, int32 [P, V, L], and whether it is a layer and no padding."""
        model, order = self.model, np.array(self.stages.rows)
        of_layer = [model.window if local else GLOBAL for local in model.is_local[model.dense_layers :]]
        windows = np.array([of_layer[max(layer, 0)] for layer in order], np.int32)
        return self.split_rows((jnp.asarray(windows), jnp.asarray(order >= 0)))

    def _apply(self, row, x_TxD, segments_T):
        weights, window, real = row
        y_TxD = self.block.apply({"params": weights}, x_TxD, window, segments_T)[0]
        return y_TxD if min(self.stages.rows) >= 0 else jnp.where(real, y_TxD, x_TxD)
