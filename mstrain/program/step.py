"""One training step: loss, gradients and update in one compiled program with a donated state.

A step is one optimizer update; `state["step"]` is the number of updates finished.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mstrain.data import CONCATENATED, Batch
from mstrain.gemm.copies import DATA, EXPERT, REPLICA
from mstrain.hardware import once_options
from mstrain.mesh import platform_of
from mstrain.models.parameters import (
    gather_parameters,
    gradient_shards,
    init_parameters,
    is_masked,
    parameter_shapes,
    parameter_shardings,
)
from mstrain.models.transformer import Transformer
from mstrain.models.vectors import repeat_vectors
from mstrain.program.balance import load_metrics, shift_biases, take_loads
from mstrain.program.canonical_update import OnCanonical, init_moments, spread, update
from mstrain.program.offload import offloads_moments, on_device, on_host
from mstrain.program.pipeline import pipelined_gradients
from mstrain.program.program import Program, abstract
from mstrain.program.rounding import GradientSums

State = dict  # {"step": int32, "params": ..., "optimizer": ...}


def mean_loss(module: Transformer, params, batch: Batch, count=None):
    """Mean negative log-likelihood in nats of the targets of `batch` [B, T + 1] that its mask selects.

    `count` divides the sum over them instead of their number.
    """
    return _mean_of("loss", module, params, batch, count)


def _mean_of(method: str, module: Transformer, params, batch: Batch, count, gathered: bool = False):
    """Means over the targets of what a method of the model returns, float32 [..., T].

    `gathered`: `params` are from `gather_parameters`.
    """
    inputs, targets = batch.tokens[:, :-1].reshape(-1), batch.tokens[:, 1:].reshape(-1)
    segments = None if batch.segments is None else batch.segments.reshape(-1)
    losses = apply(module, params, inputs, targets, segments, method=method, gathered=gathered)
    return _mean(losses, batch.mask, num_targets(batch) if count is None else count)


def _mean(losses, mask, count):
    """The mean of all losses [..., T] without a mask, else the sum of those in `mask` over `count`."""
    if mask is None:
        return jnp.mean(losses, axis=-1)
    return jnp.sum(jnp.where(mask.reshape(-1), losses, 0), axis=-1) / count


def objective(module: Transformer, losses):
    """What a step minimizes, from the mean losses of `Transformer.losses`, [1 + mtp_layers]."""
    return losses[0] + module.model.mtp_loss * jnp.mean(losses[1:]) if module.model.mtp_layers else losses[0]


def num_targets(batch: Batch):
    """The number of targets that count in the loss, float32, at least 1."""
    if batch.mask is None:
        return jnp.float32(math.prod(batch.tokens[..., 1:].shape))
    return jnp.maximum(jnp.sum(batch.mask, dtype=jnp.float32), 1)


def apply(module: Transformer, params, *inputs, method: str, gathered: bool = False) -> Any:
    """The result of one method. Flax annotates `Module.apply` with the tuple that it returns for mutable
    collections."""
    params = params if gathered else gather_parameters(module, params)
    return module.apply({"params": params}, *inputs, method=method)


def gradients(module: Transformer, params, batch: Batch, sums: GradientSums = GradientSums(), step=0):
    """(mean losses [1 + mtp_layers], float32 mean gradients) over A microbatches of B sequences: tokens [A, B, T + 1].

    Losses are those of `Transformer.losses`, gradients those of `objective`, sharded as `params`. A target weighs the
    same in every microbatch, however many the masks of the others select. `sums` adds gradients over the microbatches
    of `step`.
    """
    microbatches = batch.tokens.shape[0]
    count = None if batch.mask is None else num_targets(batch) / microbatches
    gathered = gather_parameters(module, params)
    if module.plan.stages:

        def means(losses, mask):
            losses = _mean(losses, mask, count)
            return objective(module, losses), losses

        losses, grads = pipelined_gradients(module, gathered, batch, means, sums, step)
        total = losses, gradient_shards(module, grads)
        return jax.tree.map(lambda x: x.astype(jnp.float32) / microbatches, total)

    def minimized(gathered, batch):
        losses = _mean_of("losses", module, repeat_vectors(module, gathered), batch, count, gathered=True)
        return objective(module, losses), losses

    def shards(batch):
        (_, losses), grads = jax.value_and_grad(minimized, has_aux=True)(gathered, batch)
        return losses, gradient_shards(module, grads)

    if microbatches == 1:
        return shards(jax.tree.map(lambda x: x[0], batch))

    def add(total, part):
        number, batch = part
        losses, grads = shards(batch)
        return (total[0] + losses, sums.add(module, total[1], grads, step, number)), None

    zeros = (
        jnp.zeros(1 + module.model.mtp_layers),
        sums.zeros(gradient_shards(module, jax.tree.map(jnp.zeros_like, params))),
    )
    total, _ = jax.lax.scan(add, zeros, (jnp.arange(microbatches), batch))
    return jax.tree.map(lambda x: x.astype(jnp.float32) / microbatches, total)


def make_step(module: Transformer, optimizer: optax.GradientTransformation, sums: GradientSums = GradientSums()):
    """The compiled `step(state, batch, schedule) -> (state, metrics)`; it donates its argument `state`.

    `schedule` is from `mstrain.program.optimizer.schedule_of`; an optimizer of Optax ignores it. Metrics, float32
    scalars: `loss` before the update, `grad_norm` before clipping, and `skipped`, 1 when one of the two is not finite;
    `mtp_loss`, the mean of the losses of further tokens; of experts those of `mstrain.program.balance.load_metrics`.
    Parameters and moments are then unchanged; step counters still increase.
    """

    def step(state: State, batch: Batch, schedule):
        state = on_device(module, state)
        (loss, *of_mtp), slopes = gradients(module, state["params"], batch, sums, state["step"])
        grads, loads = take_loads(module, slopes)
        updates, moments = update(module, optimizer, grads, state, schedule)
        params = shift_biases(module, optax.apply_updates(state["params"], updates), slopes)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        new = {"step": state["step"] + 1, "params": params, "optimizer": moments}
        metrics = {"loss": loss, "grad_norm": norm, "skipped": 1.0 - finite, **load_metrics(loads)}
        if of_mtp:
            metrics["mtp_loss"] = sum(of_mtp) / len(of_mtp)
        return jax.tree.map(lambda new, old: _unless_bad(finite, new, old), new, state), metrics

    shardings = state_shardings(module, optimizer)
    replicated = NamedSharding(module.plan.mesh, P())
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, replicated))


def _unless_bad(finite, new, old):
    """`new`, or `old` for a bad step. Counters (integers) also count bad steps, so that schedules are not delayed."""
    return jnp.where(finite, new, old) if jnp.issubdtype(new.dtype, jnp.floating) else new


def init_state(module: Transformer, optimizer: optax.GradientTransformation, seed: int) -> State:
    """Step 0: initial parameters and zero moments, created with their shardings."""
    return first_state(module, optimizer, init_parameters(module, seed))


def first_state(module: Transformer, optimizer: optax.GradientTransformation, params) -> State:
    """Step 0 with the stored parameters `params` and zero moments."""
    shardings = state_shardings(module, optimizer)
    values = sum(x.size for x in jax.tree.leaves(params))
    options: Any = once_options(platform_of(module.plan.mesh), values)
    create = jax.jit(
        lambda params: init_moments(module, optimizer, params), out_shardings=shardings["optimizer"],
        compiler_options=options,
    )  # fmt: skip
    moments = create(params)
    step = jax.device_put(jnp.zeros((), jnp.int32), shardings["step"])
    return {"step": step, "params": params, "optimizer": moments}


def abstract_state(module: Transformer, optimizer: optax.GradientTransformation) -> State:
    """Shapes, dtypes and shardings of the training state; nothing is allocated."""
    params = parameter_shapes(module)
    step = jax.ShapeDtypeStruct((), jnp.int32)
    state = {"step": step, "params": params, "optimizer": _moment_shapes(module, optimizer)}
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        state,
        state_shardings(module, optimizer),
    )


def abstract_batch(mesh: Mesh, batch: int, seq: int, accumulate: int, parts: Batch = CONCATENATED) -> Batch:
    """The batch of a step: A microbatches of B of its `batch` sequences of `seq` tokens; tokens [A, B, T + 1].

    It has segments and a mask if `parts` has. Sequences are sharded over the axes of `replica`, `data`, `expert` and
    `row` that divide them.
    """
    microbatch, axes = batch // accumulate, []
    for axis in (REPLICA, DATA, EXPERT, "row"):
        if microbatch % math.prod(mesh.shape[a] for a in (*axes, axis)) == 0:
            axes.append(axis)
    dims = Batch(seq + 1, seq, seq)
    return Batch(*(
        part and abstract((accumulate, microbatch, dim), part, mesh, P(None, tuple(axes)))
        for dim, part in zip(dims, parts, strict=True)
    ))  # fmt: skip


def step_program(
    module: Transformer, optimizer: optax.GradientTransformation, batch: int, accumulate: int = 1,
    parts: Batch = CONCATENATED, sums: GradientSums = GradientSums(),
) -> Program:  # fmt: skip
    """The training step: `batch` sequences of the whole job in `accumulate` microbatches, with the `parts` of Batch."""
    abstract = abstract_batch(module.plan.mesh, batch, module.seq, accumulate, parts)
    schedule = jax.ShapeDtypeStruct((5,), jnp.float32, sharding=NamedSharding(module.plan.mesh, P()))
    arguments = (abstract_state(module, optimizer), abstract, schedule)
    step = make_step(module, optimizer, sums)
    return Program(f"step of {module.model.name}", step, arguments, module.plan.algorithm)


def state_shardings(module: Transformer, optimizer: optax.GradientTransformation) -> State:
    """Shardings of the training state: moments as the parameters they belong to, everything else replicated."""
    moments = _moment_shapes(module, optimizer)
    state = {"step": jnp.int32(0), "params": parameter_shapes(module), "optimizer": moments}
    shardings = shard_copies(parameter_shardings(module), state, optimizer)
    return shardings | {"optimizer": on_host(shardings["optimizer"])} if offloads_moments(module) else shardings


def _moment_shapes(module: Transformer, optimizer: optax.GradientTransformation):
    return jax.eval_shape(lambda params: init_moments(module, optimizer, params), parameter_shapes(module))


def shard_copies(shardings, state: State, optimizer: optax.GradientTransformation | None) -> State:
    """`shardings` of the parameters for every copy of them in `state`, replication on the same mesh for the rest, and
    `spread` for canonical moments."""
    if isinstance(optimizer, OnCanonical) and "optimizer" in state:
        rest = {key: part for key, part in state.items() if key != "optimizer"}
        return {**shard_copies(shardings, rest, None), "optimizer": spread(state["optimizer"], shardings)}
    replicated = NamedSharding(jax.tree.leaves(shardings)[0].mesh, P())

    def sharding(x, own, parameter):
        if is_masked(x):
            return x
        return own if x.shape == parameter.shape else replicated

    def of_copy(copy):
        return jax.tree.map(sharding, copy, shardings, state["params"], is_leaf=is_masked)

    return map_copies(of_copy, state, optimizer, lambda _: replicated)


def map_copies(function, state: State, optimizer: optax.GradientTransformation | None, otherwise=lambda leaf: leaf):
    """Applies `function` to the parameters in `state` and to every tree of moments that Optax derives from them.

    Canonical moments (`OnCanonical`) are not such trees.

    Args:
      function: takes a tree like the parameters, in which `optax.MaskedNode` replaces the leaves that a masked or
        partitioned optimizer keeps no moment of.
      state: {"params", "optimizer", ...}; "optimizer" may be missing, then `optimizer` is None.
      optimizer: the transformation whose `init` made `state["optimizer"]`.
      otherwise: for every other leaf, such as a count of steps.
    """
    mapped = {key: jax.tree.map(otherwise, part) for key, part in state.items() if key not in ("params", "optimizer")}
    mapped["params"] = function(state["params"])
    if isinstance(optimizer, OnCanonical) and "optimizer" in state:
        mapped["optimizer"] = jax.tree.map(otherwise, state["optimizer"])
    elif "optimizer" in state:
        assert optimizer is not None
        mapped["optimizer"] = optax.tree_map_params(
            lambda params: jax.eval_shape(optimizer.init, params), function, state["optimizer"],
            transform_non_params=otherwise, is_leaf=lambda _: True,  # a whole copy at a time
        )  # fmt: skip
    return mapped
