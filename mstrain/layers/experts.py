"""An MLP of experts: every token is computed by the K of E MLPs that a router chooses for it."""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from mstrain.gemm import Plan, PlanPair, Span, Storage, linear
from mstrain.gemm.expert_exchange import ExpertExchange
from mstrain.gemm.grouping import group_choices, rows_into, sort_values
from mstrain.layers.dense import Inits, Kernel, kernel_of
from mstrain.layers.expert_rounds import exchanged
from mstrain.layers.mlp import activate
from mstrain.layers.parameter import parameter
from mstrain.layers.router import RouterConfig, choose, router_logits

BALANCE = "balance"  # the parameter of a router that no gradient trains


class Experts(nn.Module):
    """Maps x_TxD to the weighted sum of the chosen experts' `mstrain.layers.mlp.Mlp`.

    Attributes:
      plans, width, hidden, activation, gated, bias, inits: as in `Mlp`, of every expert; the router has a `bias`, too.
      router: number and choice of experts.
      slices: parts in which tokens are exchanged where mesh axis `expert` divides the experts.
    """

    plans: PlanPair
    width: Span
    hidden: Span
    activation: str
    gated: bool
    bias: bool
    inits: Inits
    router: RouterConfig
    slices: int = 1

    @nn.compact
    def __call__(self, x_TxD, counted_T=None):
        """`counted_T`: tokens that count in the loads of experts; None for all."""
        weights_TxK, choices_TxK = self._route(x_TxD, counted_T)
        segments, plans, experts = (self.hidden,) * (2 if self.gated else 1), self.plans, self.router.experts
        up = ExpertKernels(plans.into, self.width, segments, self.inits.into, experts, name="up")()
        down = ExpertKernels(plans.out, self.hidden, (self.width,), self.inits.out, experts, name="down")()
        bias = Kernel(self._bias("up_bias", segments, plans.into), None) if self.bias else None
        mlp = ExpertMlp(plans, self.activation, self.gated, experts)
        arguments = (up, down, bias), x_TxD, weights_TxK, choices_TxK, self._capacity(len(x_TxD))
        y_TxD = mlp(*arguments) if plans.grid.expert_parts == 1 else exchanged(mlp, self._exchange(x_TxD), *arguments)
        if not self.bias:
            return y_TxD
        return add_biases(y_TxD, self._bias("down_bias", (self.width,), plans.out), plans.out, choices_TxK, weights_TxK)

    def _exchange(self, x_TxD) -> ExpertExchange:
        into, router = self.plans.into, self.router
        tokens = len(x_TxD) // into.grid.size(into.input_layout.tokens)
        return ExpertExchange(into, router.experts, router.chosen, math.gcd(self.slices, tokens), tokens)

    def _bias(self, name: str, segments: tuple[Span, ...], plan: Plan):
        """The biases [E, F] of the experts' outputs of `plan`, of all experts on every device."""
        shape = self.router.experts, sum(span.size for span in segments)
        storage = Storage(shape, segments=segments, columns=plan.grid.num_cols)
        return parameter(self, name, nn.initializers.zeros, storage, P(None, plan.output_layout.features or None))

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


class ExpertKernels(nn.Module):
    """The kernels [in, out] of `experts` projections, stored as `plan` does; attributes as in `Dense`."""

    plan: Plan
    inputs: Span
    segments: tuple[Span, ...]
    initializer: Callable
    experts: int

    @nn.compact
    def __call__(self) -> Kernel:
        storage = self.plan.storage(self.inputs, self.segments, self.experts)
        return kernel_of(self, self.plan, storage, self.initializer)


@dataclasses.dataclass(frozen=True)
class ExpertMlp:
    """The products of `experts` MLPs, or of the part of them that a device along mesh axis `expert` has."""

    plans: PlanPair
    activation: str
    gated: bool
    experts: int

    def __call__(
        self,
        kernels: tuple[Kernel, Kernel, Kernel | None],
        x_TxD,
        weights_TxK,
        choices_TxK,
        capacity=None,
        here_TxK=None,
    ):
        """The sum of the chosen experts' results times `weights_TxK`; without the biases of `down`.

        Args:
          kernels: up, down, and the biases of `up` if there are some.
          capacity: as in `group_choices`.
          here_TxK: `choices_TxK`, none of them below 0, as numbers of the device's own experts.
        """
        into, out = self.plans.into, self.plans.out
        own = choices_TxK if here_TxK is None else here_TxK
        groups = group_choices(own, self.experts // into.grid.expert_parts, into, capacity, here_TxK is not None)
        rows = rows_into(into, own.shape[1], whole=capacity is None and here_TxK is None)
        up, down, bias = kernels
        h = checkpoint_name(linear(x_TxD, up.value, into, up.sink, groups, rows), "mlp-in")
        if bias is not None:
            of_rows = sort_values(choices_TxK + 1, groups, into)[:, None] - 1  # below 0 in rows without a token
            h = add_biases(h, bias.value, into, of_rows, jnp.ones(of_rows.shape))
        h = activate(h, self.plans, self.activation, self.gated, sort_values(weights_TxK, groups, into))
        y = linear(h, down.value, out, down.sink, groups, rows.reversed)
        return checkpoint_name(y, "mlp-out")


def add_biases(y_RxF, bias_ExF, plan: Plan, experts_RxK, weights_RxK):
    """Adds to every row of the output of `plan` the biases of its experts, times their weights."""
    layout = plan.output_layout

    def local(y, bias, experts_RxK, weights_RxK):
        chosen = experts_RxK[:, :, None] == jnp.arange(len(bias))
        shares_RxE = jnp.sum(jnp.where(chosen, weights_RxK[:, :, None], 0), axis=1)
        return y + jnp.matmul(shares_RxE, bias, precision=jax.lax.Precision.HIGHEST).astype(y.dtype)

    rows = P(layout.tokens or None)
    return jax.shard_map(
        local, mesh=plan.grid.mesh, in_specs=(layout.spec, P(None, layout.features or None), rows, rows),
        out_specs=layout.spec, check_vma=False,
    )(y_RxF, bias_ExF, experts_RxK, weights_RxK)  # fmt: skip
