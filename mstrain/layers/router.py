"""The router of an expert layer: which experts a token chooses, with which weights, and what keeps their load even.

Logits, scores and losses are float32. All devices that share tokens compute the same choices. Losses that keep the load
even are not part of the loss that a step reports: `add_gradient` adds their gradients to those of the logits, so blocks
of a scan, of a pipeline or of prefetched weights need no second result. The load itself leaves a step in the same way,
as the gradient of the parameter `balance`.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from mstrain.gemm import Layout
from mstrain.gemm.local import all_reduce

SCORES = ("softmax", "sigmoid")


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """How tokens choose experts.

    Attributes:
      experts: number of experts E.
      chosen: experts that a token chooses, K.
      scores: one of `SCORES`, of the logits of all experts.
      normalized: whether the weights of a token are divided by their sum.
      scale: factor on the weights.
      balance_loss: factor of E * sum over experts of (share of the choices) * (mean share of the scores).
      z_loss: factor of the mean of logsumexp(logits) ** 2.
      capacity: choices of an expert that count, over the mean per expert; None for all.
      groups: number of groups of consecutive experts, and of those whose experts a token may choose: with the highest
        score of an expert, or with sigmoid the highest sum of two (DeepSeek-V2 and V3).
    """

    experts: int
    chosen: int
    scores: str = "softmax"
    normalized: bool = True
    scale: float = 1.0
    balance_loss: float = 0.0
    z_loss: float = 0.0
    capacity: float | None = None
    groups: tuple[int, int] = (1, 1)


def router_logits(x_TxD, kernel_DxE, layout: Layout, mesh: Mesh | AbstractMesh):
    """float32 logits [T, E], sharded as the tokens of x, whose sharding is `layout`; those of features sum up."""
    tokens, features = layout.tokens or None, layout.features or None

    def local(x, kernel):
        logits = jnp.matmul(x.astype(jnp.float32), kernel, precision=lax.Precision.HIGHEST)
        return all_reduce(logits, layout.features)

    in_specs = (layout.spec, P(features, None))
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=P(tokens, None), check_vma=False)(
        x_TxD, kernel_DxE
    )


def choose(logits_TxE, balance_E, config: RouterConfig, counted_T=None):
    """(weights float32 [T, K], experts int32 [T, K]) that tokens choose, the best first.

    `balance_E` is added to the scores for the choice only; its gradient is the load of each expert, 1 where it is even.
    `counted_T`: tokens that count in loads and losses; None for all.
    """
    scores = _scores(logits_TxE, config)
    _, choices = lax.top_k(_in_best_groups(lax.stop_gradient(scores + balance_E), config), config.chosen)
    weights = jnp.take_along_axis(scores, choices, axis=1)
    if config.normalized:
        weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + 1e-20)
    counted = jnp.ones(len(choices)) if counted_T is None else counted_T.astype(jnp.float32)
    load_E = _load(choices, config.experts, counted)
    weights = add_gradient(weights * config.scale, balance_E, load_E)
    if config.balance_loss or config.z_loss:
        slope = jax.grad(_penalty)(lax.stop_gradient(logits_TxE), load_E, counted, config)
        weights = add_gradient(weights, logits_TxE, slope)
    return weights, choices


@jax.custom_vjp
def add_gradient(y, x, slope):
    """y; `slope` is added to the gradient of x."""
    del x, slope
    return y


add_gradient.defvjp(lambda y, x, slope: (y, slope), lambda slope, dy: (dy, slope, jnp.zeros_like(slope)))


def _scores(logits_TxE, config: RouterConfig):
    return jax.nn.softmax(logits_TxE, axis=1) if config.scores == "softmax" else jax.nn.sigmoid(logits_TxE)


def _in_best_groups(scores_TxE, config: RouterConfig):
    """The scores of experts in the best groups of each token, -inf for others."""
    groups, best = config.groups
    if best == groups:
        return scores_TxE
    grouped = scores_TxE.reshape(len(scores_TxE), groups, -1)
    of_groups = jnp.sum(lax.top_k(grouped, 1 if config.scores == "softmax" else 2)[0], axis=2)
    chosen = lax.top_k(of_groups, best)[1]
    allowed_TxG = jnp.any(chosen[:, :, None] == jnp.arange(groups), axis=1)
    return jnp.where(allowed_TxG[:, :, None], grouped, -jnp.inf).reshape(scores_TxE.shape)


def _load(choices_TxK, experts: int, counted_T):
    """Choices of each expert over the mean, float32 [E]."""
    chosen = (choices_TxK[:, :, None] == jnp.arange(experts)) * counted_T[:, None, None]
    counts = jnp.sum(chosen, axis=(0, 1))
    return counts * experts / jnp.maximum(jnp.sum(counted_T) * choices_TxK.shape[1], 1)


def _penalty(logits_TxE, load_E, counted_T, config: RouterConfig):
    """The losses of `RouterConfig`, means over the tokens that count."""
    scores = _scores(logits_TxE, config)
    shares = scores / jnp.sum(scores, axis=1, keepdims=True)
    squares = jnp.square(jax.nn.logsumexp(logits_TxE, axis=1))
    total = config.balance_loss * (shares @ load_E) + config.z_loss * squares
    return jnp.sum(total * counted_T) / jnp.maximum(jnp.sum(counted_T), 1)
