"""An MLP of experts: every token is computed by the K of E MLPs that a router chooses for it."""

import math

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from mstrain.gemm import Plan, PlanPair, Span, Storage
from mstrain.gemm.grouping import group_choices, rows_into, sort_values
from mstrain.layers.dense import Dense, Inits
from mstrain.layers.mlp import activate
from mstrain.layers.parameter import parameter
from mstrain.layers.router import RouterConfig, choose, router_logits

BALANCE = "balance"  # the parameter of a router that no gradient trains


class Experts(nn.Module):
    """Maps x_TxD to the weighted sum of the chosen experts' `mstrain.layers.mlp.Mlp`.

    Attributes:
      plans, width, hidden, activation, gated, bias, inits: as in `Mlp`, of every expert; the router has a `bias`, too.
      router: number and choice of experts.
    """

    plans: PlanPair
    width: Span
    hidden: Span
    activation: str
    gated: bool
    bias: bool
    inits: Inits
    router: RouterConfig

    @nn.compact
    def __call__(self, x_TxD, counted_T=None):
        """`counted_T`: tokens that count in the loads of experts; None for all."""
        weights_TxK, choices_TxK = self._route(x_TxD, counted_T)
        groups = group_choices(choices_TxK, self.router.experts, self.plans.into, self._capacity(len(x_TxD)))
        rows = rows_into(self.plans.into, self.router.chosen)
        segments = (self.hidden,) * (2 if self.gated else 1)
        into = (self.plans.into, self.width, segments, self.inits.into, False, "mlp-in", self.router.experts)
        out = (self.plans.out, self.hidden, (self.width,), self.inits.out, False, "mlp-out", self.router.experts)
        h = Dense(*into, name="up")(x_TxD, groups, rows)
        if self.bias:
            of_rows = sort_values(choices_TxK, groups, self.plans.into)[:, None]
            h = self._add_biases(h, "up_bias", segments, self.plans.into, of_rows, jnp.ones(of_rows.shape))
        h = activate(h, self.plans, self.activation, self.gated)
        scales = sort_values(weights_TxK, groups, self.plans.into)
        h = jax.lax.with_sharding_constraint(
            h * scales[:, None].astype(h.dtype), self.plans.grid.sharding(self.plans.inside.spec)
        )
        y_TxD = Dense(*out, name="down")(h, groups, rows.reversed)
        if not self.bias:
            return y_TxD
        return self._add_biases(y_TxD, "down_bias", (self.width,), self.plans.out, choices_TxK, weights_TxK)

    def _add_biases(self, y_RxF, name: str, segments: tuple[Span, ...], plan: Plan, experts_RxK, weights_RxK):
        """Adds to every row of the output of `plan` the biases of its experts, times their weights."""
        experts, layout = self.router.experts, plan.output_layout
        storage = Storage(
            (experts, sum(span.size for span in segments)), segments=segments, columns=plan.grid.num_cols
        )  # fmt: skip
        bias_ExF = parameter(self, name, nn.initializers.zeros, storage, P(None, layout.features or None))

        def local(y, bias, experts_RxK, weights_RxK):
            chosen = experts_RxK[:, :, None] == jnp.arange(experts)
            shares_RxE = jnp.sum(jnp.where(chosen, weights_RxK[:, :, None], 0), axis=1)
            return y + jnp.matmul(shares_RxE, bias, precision=jax.lax.Precision.HIGHEST).astype(y.dtype)

        rows = P(layout.tokens or None)
        return jax.shard_map(
            local, mesh=plan.grid.mesh, in_specs=(layout.spec, P(None, layout.features or None), rows, rows),
            out_specs=layout.spec, check_vma=False,
        )(y_RxF, bias_ExF, experts_RxK, weights_RxK)  # fmt: skip

    def _route(self, x_TxD, counted_T):
        layout, experts = self.plans.residual, self.router.experts
        storage = Storage((self.width.size, experts), (Span(experts),), first=self.width)
        kernel = parameter(self, "router", self.inits.into, storage, P(layout.features or None, None))
        balance = parameter(self, BALANCE, nn.initializers.zeros, Storage((experts,)), P(None))
        logits = router_logits(x_TxD, kernel, layout, self.plans.grid.mesh)
        if self.bias:
            logits += parameter(self, "router_bias", nn.initializers.zeros, Storage((experts,)), P(None))
        weights, choices = choose(logits, balance, self.router, counted_T)
        return weights, checkpoint_name(choices, "router")

    def _capacity(self, tokens: int) -> int | None:
        if self.router.capacity is None:
            return None
        return math.ceil(self.router.capacity * tokens * self.router.chosen / self.router.experts)
