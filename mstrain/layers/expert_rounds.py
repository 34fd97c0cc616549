"""Experts on the devices along mesh axis `expert`: rounds of sending tokens, multiplying them and receiving results.

The rounds of slices do not depend on each other, so the exchange of one runs beside the products of another. Further
rounds, which only an uneven load needs, are a loop. Its backward pass computes each of them again, so nothing is saved
that grows with their number. Gradients of kernels are sums over rounds, and then once over data-parallel replicas.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from mstrain.gemm.copies import copies_of, sum_copies
from mstrain.gemm.expert_exchange import FURTHER, ROUND, ExpertExchange
from mstrain.gemm.grouping import dropped
from mstrain.gemm.plan import Plan
from mstrain.layers.dense import Kernel


def exchanged(mlp: Any, exchange: ExpertExchange, kernels, x_TxD, weights_TxK, choices_TxK, capacity=None):
    """`mlp`, an `ExpertMlp`, of these arguments, with tokens sent to the devices of the experts that they chose."""
    up, down, bias = kernels
    up, down = (_sum_later(kernel, x_TxD.dtype, plan) for kernel, plan in ((up, mlp.plans.into), (down, mlp.plans.out)))
    if capacity is not None:
        kept = ~dropped(choices_TxK, exchange.experts, exchange.plan, capacity)
        choices_TxK = jnp.where(kept, choices_TxK, exchange.experts)
    places_TxK, late = exchange.assign(choices_TxK)

    def round_of(kernels, x, weights, choices, places, turn):
        sent = exchange.sent(places, turn)
        received = exchange.send(x, sent)
        weights = exchange.send(weights.reshape(-1), sent)
        choices = exchange.scatter(choices.reshape(-1) + 1, sent) - 1
        here = exchange.numbered_here(choices)[:, None]
        with jax.named_scope(ROUND):
            y = mlp(kernels, received, weights[:, None], choices[:, None], here_TxK=here)
        return exchange.receive(y, sent)

    x = exchange.split(x_TxD, features=True)
    weights, choices, places = map(exchange.split, (weights_TxK, choices_TxK, places_TxK))
    y_TxD = exchange.join(
        [round_of((up, down, bias), x[i], weights[i], choices[i], places[i], i) for i in range(exchange.slices)]
    )
    if exchange.may_overflow:
        arguments = (up, down, bias), x_TxD, weights_TxK, choices_TxK, places_TxK
        y_TxD = y_TxD + _further_rounds(round_of, exchange.slices, late, *arguments)
    return y_TxD


def _further_rounds(round_of: Callable, first: int, count, kernels, x, weights, choices, places):
    """The sum of `round_of(..., turn)` of `count` rounds from `first` on."""

    def split(kernels):
        """What a gradient is computed for, and the values of kernels with sinks."""
        trained = [kernel and (kernel.value if kernel.sink is None else kernel.sink) for kernel in kernels]
        return trained, [None if kernel is None or kernel.sink is None else kernel.value for kernel in kernels]

    def joined(trained, rest):
        pairs = zip(trained, rest, strict=True)
        return tuple(x if x is None else Kernel(x, None) if value is None else Kernel(value, x) for x, value in pairs)

    def loop(step, total, count) -> Any:
        def advance(carry):
            turn, total = carry
            return turn + 1, jax.tree.map(jnp.add, total, step(turn))

        with jax.named_scope(FURTHER):
            return lax.while_loop(lambda carry: carry[0] < first + count, advance, (jnp.int32(first), total))[1]

    @jax.custom_vjp
    def run(trained, x, weights, rest, choices, places, count):
        kernels = joined(trained, rest)
        return loop(lambda turn: round_of(kernels, x, weights, choices, places, turn), jnp.zeros_like(x), count)

    def forward(*arguments):
        return run(*arguments), arguments

    def backward(arguments, dy):
        trained, x, weights, rest, choices, places, count = arguments

        def step(turn):
            def function(trained, x, weights):
                return round_of(joined(trained, rest), x, weights, choices, places, turn)

            return jax.vjp(function, trained, x, weights)[1](dy)

        zeros = jax.tree.map(jnp.zeros_like, (trained, x, weights))
        return (*loop(step, zeros, count), None, None, None, None)

    run.defvjp(forward, backward)
    trained, rest = split(kernels)
    return run(trained, x, weights, rest, choices, places, count)


def _sum_later(kernel: Kernel, dtype, plan: Plan) -> Kernel:
    """`kernel` with a sink, whose gradient is summed over data-parallel replicas once for all products with it."""
    if plan.kind.product or kernel.sink is not None:
        return kernel
    with_sink: Any = _with_sink(kernel.value, dtype, plan)
    return Kernel(*with_sink)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _with_sink(kernel, dtype, plan):
    spec = _sink_spec(kernel.shape, plan)
    sink = jnp.zeros((plan.grid.size(spec[0]), *kernel.shape), dtype)
    return kernel, lax.with_sharding_constraint(sink, plan.grid.sharding(spec))


def _sink_spec(shape, plan: Plan) -> P:
    spec = plan.grid.spec_of(shape)
    return P(copies_of(spec, plan.grid.copies), *spec)


def _summed(dtype, plan, marker, gradients):
    gradient = gradients[1]
    summed = plan.grid.gradient_spec(gradient.shape[1:])
    local = jax.shard_map(
        lambda x: sum_copies(x[0].astype(jnp.float32), summed, plan.grid.copies).astype(marker.dtype),
        mesh=plan.grid.mesh, in_specs=_sink_spec(gradient.shape[1:], plan), out_specs=summed, check_vma=False,
    )  # fmt: skip
    return (local(gradient),)


_with_sink.defvjp(lambda kernel, dtype, plan: (_with_sink(kernel, dtype, plan), jnp.zeros((), kernel.dtype)), _summed)
