"""Vocabulary-parallel cross-entropy: logits stay sharded over the vocabulary (Megatron-LM; Shoeybi et al., 2019).

Communicates one maximum, one sum and one target logit per token, and no logits. The derivative, softmax minus one-hot,
needs no communication.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mstrain.gemm import Layout
from mstrain.gemm.local import all_reduce, axis_index


@dataclasses.dataclass(frozen=True)
class LogitsHead:
    """Size, sharding and soft cap of the logits.

    Attributes:
      vocab_size: number of tokens; further columns are padding, which the loss ignores.
      layout, mesh: of the logits.
      soft_cap: c of c * tanh(logits / c), applied before the loss (Gemma 2); None for none.
    """

    vocab_size: int
    layout: Layout
    mesh: Mesh
    soft_cap: float | None = None

    def capped(self, logits):
        """Logits in float32 after the soft cap."""
        logits = logits.astype(jnp.float32)
        return self.soft_cap * jnp.tanh(logits / self.soft_cap) if self.soft_cap else logits

    def on_mesh(self, function, in_specs, out_specs):
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def cross_entropy(logits_TxV: jax.Array, targets_T: jax.Array, head: LogitsHead) -> jax.Array:
    """Negative log-likelihood in nats of each target (int32 [T]) under logits of any float dtype; float32 [T]."""
    return _forward(logits_TxV, targets_T, head)[0]


def _forward(logits, targets, head: LogitsHead):
    axes, per_token = head.layout.features, P(head.layout.tokens)

    def local(logits, targets):
        logits, token_ids = _prepare(logits, head)
        peak = jnp.max(logits, axis=1)
        peak = lax.pmax(peak, axes) if axes else peak
        total = all_reduce(jnp.sum(jnp.exp(logits - peak[:, None]), axis=1), axes)
        is_target = token_ids == targets[:, None]
        target = all_reduce(jnp.sum(jnp.where(is_target, logits, 0), axis=1), axes)
        log_total = peak + jnp.log(total)
        return log_total - target, log_total

    run = head.on_mesh(local, (head.layout.spec, per_token), (per_token, per_token))
    loss, log_total = run(logits, targets)
    return loss, (logits, targets, log_total)


def _backward(head: LogitsHead, saved, g_T):
    per_token = P(head.layout.tokens)

    def local(raw, targets, log_total, g):
        logits, token_ids = _prepare(raw, head)
        slope = jnp.exp(logits - log_total[:, None]) - (token_ids == targets[:, None])
        if head.soft_cap:
            slope = slope * (1 - jnp.square(jnp.tanh(raw.astype(jnp.float32) / head.soft_cap)))
        return (slope * g[:, None]).astype(raw.dtype)

    specs = (head.layout.spec, per_token, per_token, per_token)
    return head.on_mesh(local, specs, head.layout.spec)(*saved, g_T), None


cross_entropy.defvjp(_forward, _backward)


def _prepare(logits, head: LogitsHead):
    """Float32 logits of this shard with soft cap and masked padding, and the token id of each column."""
    logits = head.capped(logits)
    width = logits.shape[1]
    token_ids = lax.iota(jnp.int32, width)[None, :] + axis_index(head.layout.features) * width
    return jnp.where(token_ids < head.vocab_size, logits, -1e30), token_ids
