"""The output projection: its kernel, and what its logits are."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from mstrain.gemm import Plan, Span, Storage
from mstrain.layers.parameter import parameter

MASKED = -1e30  # a logit of the padded vocabulary, which the loss ignores


class HeadKernel(nn.Module):
    """The [D, V] kernel of an output projection that is not tied to the embedding, in stored order."""

    plan: Plan
    width: Span
    vocabulary: Span
    initializer: nn.initializers.Initializer

    @nn.compact
    def __call__(self):
        shape = (self.width.size, self.vocabulary.size)
        storage = Storage(shape, (self.vocabulary,), first=self.width)
        return parameter(self, "kernel", self.initializer, storage, self.plan.grid.weight_spec)


@dataclasses.dataclass(frozen=True)
class LogitsHead:
    """The output projection.

    Attributes:
      vocab_size: number of tokens; further columns are padding, which the loss ignores.
      plan: of the product, with dataflow `os` or `rs` and one slice.
      soft_cap: c of c * tanh(logits / c), applied before the loss (Gemma 2); None for none.
    """

    vocab_size: int
    plan: Plan
    soft_cap: float | None = None

    def capped(self, logits):
        """Logits in float32 after the soft cap."""
        logits = logits.astype(jnp.float32)
        return self.soft_cap * jnp.tanh(logits / self.soft_cap) if self.soft_cap else logits

    @property
    def per_token(self) -> P:
        return P(self.plan.output_layout.tokens)

    def on_mesh(self, function, in_specs, out_specs):
        mesh, plan = self.plan.grid.mesh, self.plan
        in_specs = (plan.input_layout.spec, plan.grid.weight_spec, *in_specs)
        return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
