"""The MLP of a block: plain (up, activate, down) or gated (fused gate and up, activate, multiply, down)."""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn

from mstrain.gemm import PlanPair, Span
from mstrain.layers.dense import Dense, Inits

ACTIVATIONS = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
}


class Mlp(nn.Module):
    """Maps x_TxD to activate(x U) D, or with `gated` to (activate(x G) * (x U)) D.

    Attributes:
      plans: plans of the two projections.
      width, hidden: features D of the residual stream and F of the MLP.
      activation: a key of `ACTIVATIONS`.
      gated: whether to multiply by a second projection; [gate, up] are the two segments of one product.
      bias: whether both projections have a bias.
      inits: initializers of the two kernels.
    """

    plans: PlanPair
    width: Span
    hidden: Span
    activation: str
    gated: bool
    bias: bool
    inits: Inits

    @nn.compact
    def __call__(self, x_TxD):
        segments = (self.hidden,) * (2 if self.gated else 1)
        into = (self.plans.into, self.width, segments, self.inits.into, self.bias, "mlp-in")
        out = (self.plans.out, self.hidden, (self.width,), self.inits.out, self.bias, "mlp-out")
        return Dense(*out, name="down")(self._activate(Dense(*into, name="up")(x_TxD)))

    def _activate(self, h):
        activate = ACTIVATIONS[self.activation]

        def local(h):
            if not self.gated:
                return activate(h)
            gate, up = jnp.split(h, 2, axis=-1)  # each feature shard holds its [gate | up]
            return activate(gate) * up

        # Recomputing an activation costs less than saving its intermediate values.
        local = jax.checkpoint(local, prevent_cse=False)
        spec = self.plans.inside.spec
        return jax.shard_map(local, mesh=self.plans.grid.mesh, in_specs=spec, out_specs=spec, check_vma=False)(h)
