"""An MLP of experts: every token is computed by the K of E MLPs that a router chooses for it."""

import math

import jax
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from mstrain.gemm import PlanPair, Span, Storage
from mstrain.gemm.grouping import group_choices, rows_into, sort_values
from mstrain.layers.dense import Dense, Inits
from mstrain.layers.mlp import activate
from mstrain.layers.parameter import parameter
from mstrain.layers.router import RouterConfig, choose, router_logits

BALANCE = "balance"  # the parameter of a router that no gradient trains


class Experts(nn.Module):
    """Maps x_TxD to the weighted sum of the chosen experts' `mstrain.layers.mlp.Mlp`.

    Attributes:
      plans, width, hidden, activation, gated, inits: as in `Mlp`, of every expert.
      router: number and choice of experts.
    """

    plans: PlanPair
    width: Span
    hidden: Span
    activation: str
    gated: bool
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
        h = activate(Dense(*into, name="up")(x_TxD, groups, rows), self.plans, self.activation, self.gated)
        scales = sort_values(weights_TxK, groups, self.plans.into)
        h = jax.lax.with_sharding_constraint(
            h * scales[:, None].astype(h.dtype), self.plans.grid.sharding(self.plans.inside.spec)
        )
        return Dense(*out, name="down")(h, groups, rows.reversed)

    def _route(self, x_TxD, counted_T):
        layout, experts = self.plans.residual, self.router.experts
        storage = Storage((self.width.size, experts), (Span(experts),), first=self.width)
        kernel = parameter(self, "router", self.inits.into, storage, P(layout.features or None, None))
        balance = parameter(self, BALANCE, nn.initializers.zeros, Storage((experts,)), P(None))
        logits = router_logits(x_TxD, kernel, layout, self.plans.grid.mesh)
        weights, choices = choose(logits, balance, self.router, counted_T)
        return weights, checkpoint_name(choices, "router")

    def _capacity(self, tokens: int) -> int | None:
        if self.router.capacity is None:
            return None
        return math.ceil(self.router.capacity * tokens * self.router.chosen / self.router.experts)
