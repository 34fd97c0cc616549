"""The gradients of a pipelined step: one scan over the ticks of a schedule (`mstrain.parallel.schedules.ticks`).

In a tick, all stages run a forward pass and then a backward pass of one of their chunks, each for the microbatch that
the schedule gives it; what a stage without one computes is not used. What a forward pass saves for its backward pass is
in one of as many slots as the schedule has microbatches in flight, or one more for what is not used. Activations are
sent to the next stage beside the backward passes, gradients to the stage before beside the forward passes.

With schedule zero-bubble, a backward pass leaves the products that make the gradients of kernels to a third pass, in
ticks in which all stages have one. What it leaves to them (`mstrain.models.halves`) has slots of its own.

The embedding, the first, dense layers of a model with experts and the output projection are outside of the stages, on
the devices of all of them: the tick in which the last stage has finished a microbatch also computes its loss and the
gradient of its logits, and that in which a microbatch leaves the first stage computes the dense layers again.
"""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mstrain.data import Batch
from mstrain.gemm.copies import gathered_spec
from mstrain.models.parameters import STACK, abstract_parameters
from mstrain.models.transformer import Transformer
from mstrain.models.vectors import repeat_vectors, repeated_spec
from mstrain.parallel.schedules import BACKWARD, DIRECTIONS, FORWARD, IN_TICKS, WEIGHTS, ticks
from mstrain.program.rounding import GradientSums


@dataclasses.dataclass(frozen=True)
class Ticks:
    """What every stage does in every tick of a schedule.

    Attributes:
      active: whether a stage has a pass, bool [ticks, 3, P]; of every direction.
      microbatch, chunk, slot, deferred: of this pass, int32 [ticks, 3, P]; chunk counts those of a stage, slot is the
        place of what a forward pass saves, and deferred that of what a backward pass leaves to the weights.
      slots, deferred_slots: number of both of every stage; the second is 0 if no pass is left to the weights.
    """

    active: np.ndarray
    microbatch: np.ndarray
    chunk: np.ndarray
    slot: np.ndarray
    deferred: np.ndarray
    slots: int
    deferred_slots: int


def table_of(name: str, stages: int, microbatches: int, chunks: int) -> Ticks:
    """The ticks of the schedule called `name` with `chunks` in all, as arrays."""
    schedule = ticks(name, stages, microbatches, chunks)
    active, microbatch, chunk = (np.zeros((len(schedule), len(DIRECTIONS), stages), np.int32) for _ in range(3))
    arrived: dict[tuple, int] = {}  # tick by task
    for t, tasks in enumerate(schedule):
        for task in tasks:
            at = t, task.direction, task.stage
            before = (task.chunk + (1 if task.direction else -1), task.direction, task.microbatch)
            neighbor = t - 1 if task.direction != WEIGHTS else t
            assert arrived.get(before, neighbor) == neighbor, f"{task} does not follow its neighbor at once"
            arrived[task[1:]] = t
            active[at], microbatch[at], chunk[at] = 1, task.microbatch, task.chunk // stages
    divided = active[:, WEIGHTS].any()
    slot = _slots(active, microbatch, chunk, FORWARD, WEIGHTS if divided else BACKWARD)
    deferred = _slots(active, microbatch, chunk, BACKWARD, WEIGHTS) if divided else np.zeros_like(slot)
    counts = slot.max() + 1, deferred.max() + 1 if divided else 0
    return Ticks(active.astype(bool), microbatch, chunk, slot, deferred, *counts)


def _slots(active, microbatch, chunk, written: int, read: int) -> np.ndarray:
    """The place of what passes of direction `written` store until those of direction `read` have it, by pass.

    A pass that does not count stores, too, where nothing is held.
    """
    slot = np.zeros_like(active)
    for stage in range(active.shape[2]):
        held: dict[tuple, int] = {}  # slot by (chunk, microbatch)
        for t in range(len(active)):
            slot[t, written, stage] = next(n for n in range(len(held) + 1) if n not in held.values())
            for direction in range(written, read + 1):
                at = t, direction, stage
                if active[at]:
                    slot[at] = held.setdefault((chunk[at], microbatch[at]), slot[t, written, stage])
            if active[t, read, stage]:
                del held[chunk[t, read, stage], microbatch[t, read, stage]]
    return slot


def pipelined_gradients(module: Transformer, params, batch: Batch, mean_loss, sums: GradientSums, step):
    """Sums over microbatches of mean losses and of the gradients of `params`; batch [A, B, T + 1].

    `mean_loss(losses, mask_BxT)` is (what is minimized, mean losses) of a microbatch, from `Transformer.losses`. `sums`
    adds the gradients of step number `step`.
    """
    return _Pipeline(module, params, batch, mean_loss, sums, step).run()


class _Pipeline:
    """The ticks of one step, while it is traced."""

    def __init__(self, module: Transformer, params, batch: Batch, mean_loss, sums: GradientSums, step):
        stages = module.plan.stages
        assert stages
        self.module, self.batch, self.mean_loss, self.sums, self.step = module, batch, mean_loss, sums, step
        self.layers, self.last = module.stage_layers(), stages.count - 1
        self.stack = params[STACK]
        self.rows = self.layers.split_rows(repeat_vectors(module, {STACK: self.stack})[STACK])
        self.outer = {name: tree for name, tree in params.items() if name != STACK}
        self.inputs = batch.tokens[:, :, :-1].reshape(len(batch.tokens), -1)
        self.targets = batch.tokens[:, :, 1:].reshape(len(batch.tokens), -1)
        segments = batch.segments
        self.segments = None if segments is None else segments.reshape(len(segments), -1)
        self.table = table_of(stages.schedule, stages.count, len(batch.tokens), len(stages.layers))
        self.deepest_chunk = stages.chunks - 1

    def run(self):
        """The carry goes through runs of ticks with the same directions, each a scan."""
        carry, begin = self._start(), 0
        for kind, same in itertools.groupby(tuple(map(bool, each)) for each in np.any(self.table.active, axis=2)):
            end = begin + len(list(same))
            carry = self._run_of_ticks(carry, begin, end, *kind)
            begin = end
        rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:]), carry["rows"])
        stack = jax.tree.map(lambda x, own: x.sum(axis=1) if x.ndim > own.ndim else x, rows, self.stack)
        return carry["loss"], {**carry["outer"], STACK: stack}

    def _start(self) -> dict[str, Any]:
        x = jax.eval_shape(self._embed, self.outer, jnp.int32(0))
        stages = self.last + 1
        x_PxTxD = jnp.zeros((stages, *x.shape), x.dtype)
        chunk = jnp.zeros(stages, jnp.int32)
        segments, slots = self._segments_of(chunk), self.table.slots
        _, saved = jax.eval_shape(self.layers.forward, self.rows, x_PxTxD, segments, chunk)
        deferred = None
        if self.table.deferred_slots:
            passed = jax.eval_shape(self.layers.backward_of_inputs, self.rows, saved, x_PxTxD, segments, chunk)
            deferred = _rings(passed[2], self.table.deferred_slots)
        return {
            "x": self.layers.constrain(x_PxTxD), "dx": self.layers.constrain(x_PxTxD),
            "saved": _rings(saved, slots), "deferred": deferred,
            "dy": jnp.zeros((slots, *x.shape), x.dtype),
            "loss": jnp.zeros(1 + self.module.model.mtp_layers),
            "rows": self._zero_gradients(), "outer": self._zeros(self.outer),
        }  # fmt: skip

    def _zeros(self, weights):
        """The sums of no gradients: float32 before `sums` stores them, also those of gathered weights."""
        return self.sums.zeros(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), weights))

    def _zero_gradients(self):
        """Of the rows [P, V, L, ...]: shards of data-parallel replicas where sums are; a vector's are of every shard of
        tokens."""
        scattered, mesh = self.module.plan.shard in ("gradients", "parameters"), self.module.plan.mesh

        def shard(zeros, box):
            spec = repeated_spec(self.module, box) or (box.spec if scattered else gathered_spec(box.spec))
            return lax.with_sharding_constraint(zeros, NamedSharding(mesh, P(spec[0], None, None, *spec[1:])))

        return jax.tree.map(shard, self._zeros(self.rows), abstract_parameters(self.module)[STACK])

    def _run_of_ticks(self, carry, begin: int, end: int, forward: bool, backward: bool, weights: bool):
        names = ("active", "microbatch", "chunk", "slot", "deferred")
        part = {name: getattr(self.table, name)[begin:end] for name in names}
        ends = self._at_ends(part)
        ever = {name: _in_ticks(flags) for name, flags in ends.items()}

        def tick(carry, step):
            each, ends = step
            of = [{name: x[direction] for name, x in each.items()} for direction in DIRECTIONS]
            dy = self.layers.shift(carry["dx"], -1) if backward else None
            if forward:
                carry = self._forward(carry, of[FORWARD], ends, ever)
            if backward:
                carry = self._backward(carry, of[BACKWARD], ends, ever, dy)
            if weights:
                carry = self._weights(carry, of[WEIGHTS])
            return carry, None

        return lax.scan(tick, carry, jax.tree.map(jnp.asarray, (part, ends)))[0]

    def _at_ends(self, part) -> dict[str, np.ndarray]:
        """By tick: whether the embedding, the loss, or the backward pass of either runs; bool [ticks]."""
        first, last = (part["active"] & (part["chunk"] == chunk) for chunk in (0, self.deepest_chunk))
        return {
            "embedding": first[:, FORWARD, 0], "loss": last[:, FORWARD, self.last],
            "loss_gradient": last[:, BACKWARD, self.last], "embedding_gradient": first[:, BACKWARD, 0],
        }  # fmt: skip

    def _embed(self, outer, microbatch):
        segments = None if self.segments is None else self.segments[microbatch]
        params = {"params": repeat_vectors(self.module, outer)}
        return self.module.apply(params, self.inputs[microbatch], segments, method="stage_input")

    def _loss(self, outer, x_TxD, microbatch):
        segments = None if self.segments is None else self.segments[microbatch]
        losses = self.module.apply({"params": outer}, x_TxD, self.targets[microbatch], segments, method="head_losses")
        return self.mean_loss(losses, None if self.batch.mask is None else self.batch.mask[microbatch])

    def _segments_of(self, microbatch_P):
        """Segments of one microbatch for every stage."""
        segments, tokens = None if self.segments is None else self.segments[microbatch_P], self.inputs.shape[1]
        if segments is not None:
            return jax.vmap(lambda segments: self.module.ordered_segments(segments, tokens))(segments)
        same = self.module.ordered_segments(None, tokens)
        return None if same is None else jnp.broadcast_to(same, (len(microbatch_P), len(same)))

    def _forward(self, carry, of, ends, ever):
        x = carry["x"]
        if ever["embedding"]:
            with jax.named_scope(ever["embedding"]):
                entering = lax.cond(
                    ends["embedding"],
                    lambda: self._embed(self.outer, of["microbatch"][0]),
                    lambda: jnp.zeros_like(x[0]),
                )
            x = x.at[0].set(jnp.where(ends["embedding"], entering, x[0]))
        y, saved = self.layers.forward(self.rows, x, self._segments_of(of["microbatch"]), of["chunk"])
        carry = {**carry, "x": self.layers.shift(y, 1), "saved": _store(carry["saved"], saved, of["slot"])}
        if not ever["loss"]:
            return carry

        def add_loss(loss, outer, dy):
            x_TxD, microbatch = self.layers.of_stage(y, self.last), of["microbatch"][self.last]
            minimized = jax.value_and_grad(self._loss, argnums=(0, 1), has_aux=True)
            (_, value), (d_outer, dx) = minimized(self.outer, x_TxD, microbatch)
            slot = of["slot"][self.last]
            outer = self.sums.add(self.module, outer, d_outer, self.step, microbatch)
            return loss + value, outer, lax.dynamic_update_index_in_dim(dy, dx, slot, 0)

        before = carry["loss"], carry["outer"], carry["dy"]
        with jax.named_scope(ever["loss"]):
            loss, outer, dy = lax.cond(ends["loss"], add_loss, lambda *same: same, *before)
        return {**carry, "loss": loss, "outer": outer, "dy": dy}

    def _backward(self, carry, of, ends, ever, dy):
        if ever["loss_gradient"]:
            returning = lax.dynamic_index_in_dim(carry["dy"], of["slot"][self.last], keepdims=False)
            dy = dy.at[self.last].set(jnp.where(ends["loss_gradient"], returning, dy[self.last]))
        arguments = (self.rows, _load(carry["saved"], of["slot"]), dy, self._segments_of(of["microbatch"]), of["chunk"])
        if self.table.deferred_slots:
            dx, gradients, rest = self.layers.backward_of_inputs(*arguments)
            carry = {**carry, "deferred": _store(carry["deferred"], rest, of["deferred"])}
        else:
            dx, gradients = self.layers.backward(*arguments)
        carry = {**carry, "dx": dx, "rows": self._accumulate(carry["rows"], gradients, of)}
        if not ever["embedding_gradient"]:
            return carry

        def add_gradient(outer):
            _, pullback = jax.vjp(lambda outer: self._embed(outer, of["microbatch"][0]), self.outer)
            added = len(self.inputs) + of["microbatch"][0]  # after as many additions of losses
            return self.sums.add(self.module, outer, pullback(self.layers.of_stage(dx, 0))[0], self.step, added)

        with jax.named_scope(ever["embedding_gradient"]):
            return {
                **carry,
                "outer": lax.cond(ends["embedding_gradient"], add_gradient, lambda outer: outer, carry["outer"]),
            }

    def _weights(self, carry, of):
        saved, rest = _load(carry["saved"], of["slot"]), _load(carry["deferred"], of["deferred"])
        segments = self._segments_of(of["microbatch"])
        gradients = self.layers.backward_of_kernels(self.rows, saved, rest, segments, of["chunk"])
        return {**carry, "rows": self._accumulate(carry["rows"], gradients, of)}

    def _accumulate(self, totals, gradients, of):
        """Adds gradients [P, L, ...] to the active chunks of `totals` [P, V, L, ...]; None are of another pass."""
        layers_PxVxL = self.layers.split_rows(jnp.asarray(self.layers.stages.rows))

        def of_stage(totals, gradients, layers, chunk, active, microbatch):
            def own(x):
                return lax.dynamic_index_in_dim(x, chunk, keepdims=False) if len(x) > 1 else x[0]

            def add(total, gradient):
                return None if gradient is None else own(total).astype(jnp.float32) + jnp.where(active, gradient, 0)

            def store(total, new):
                return total if new is None else lax.dynamic_update_index_in_dim(total, new, chunk, 0)

            exact = {STACK: jax.tree.map(add, totals, gradients)}
            new = self.sums.rounded(self.module, exact, self.step, microbatch, own(layers))[STACK]
            return jax.tree.map(store, totals, new)

        return jax.vmap(of_stage)(totals, gradients, layers_PxVxL, of["chunk"], of["active"], of["microbatch"])


def _in_ticks(flags) -> str:
    """The name of what happens in the ticks with `flags`, by which a compiled schedule tells them apart; empty without
    one."""
    return IN_TICKS + "".join("01"[int(flag)] for flag in flags) if flags.any() else ""


def _rings(tree, slots: int):
    """Zeros [P, slots, ...] for every [P, ...]."""
    return jax.tree.map(lambda x: jnp.zeros((x.shape[0], slots, *x.shape[1:]), x.dtype), tree)


def _store(rings, tree, slot_P):
    store = jax.vmap(lambda ring, x, slot: lax.dynamic_update_index_in_dim(ring, x, slot, 0))
    return jax.tree.map(lambda ring, x: store(ring, x, slot_P), rings, tree)


def _load(rings, slot_P):
    load = jax.vmap(lambda ring, slot: lax.dynamic_index_in_dim(ring, slot, keepdims=False))
    return jax.tree.map(lambda ring: load(ring, slot_P), rings)
