"""Multi-token prediction (DeepSeek-V3 technical report, 2024, section 2.2): layers that predict further tokens.

The inputs of layer k of K at position i are the features that predict token i + k, of the model or of layer k - 1, and
the embedding of token i + k; its own features predict token i + k + 1. As in the published weights, features are those
after their norm, and the embedding comes first in the product.
"""

from collections.abc import Callable

import jax.numpy as jnp
from flax import linen as nn

from mstrain.layers.dense import DensePair
from mstrain.models.model_plan import ModelPlan


class MtpLayer(nn.Module):
    """One layer.

    Attributes:
      block: a transformer block without parent.
      norm: makes a norm of the features that the output projection reads, by its name.
      plan: of the model.
      initializer: of the product of features and embedding.
    """

    block: nn.Module
    norm: Callable[..., nn.Module]
    plan: ModelPlan
    initializer: Callable

    @nn.compact
    def __call__(self, x_TxD, embedded_TxD, window, segments_T, move):
        """Normalized features from those before and the embeddings of the next tokens; `move(x_TxD, layout)` constrains
        to a layout."""
        layout, width = self.plan.head.input_layout, self.plan.width
        assert self.plan.mtp, "of a model with such layers"
        join = DensePair(self.plan.mtp, layout, width, width, self.initializer, name="projection")
        y_TxD = join(self.norm(name="embedding_norm")(embedded_TxD), self.norm(name="hidden_norm")(x_TxD))
        y_TxD, _ = self.block(move(y_TxD, self.plan.groups[-1][0].attention.residual), window, segments_T)
        return self.norm(name="norm")(move(y_TxD, layout))


def ahead(x_T, seq: int):
    """The values of the next tokens, 0 at the end of every sequence of `seq` tokens."""
    return jnp.pad(x_T.reshape(-1, seq)[:, 1:], ((0, 0), (0, 1))).reshape(-1)


def at_targets(losses_T, segments_T, depth: int, seq: int):
    """Losses of layer `depth`, moved to the positions of their targets: 0 for the first ones of a sequence or
    segment."""
    losses_BxT = losses_T.reshape(-1, seq)
    moved = jnp.pad(losses_BxT, ((0, 0), (depth, 0)))[:, :seq]
    if segments_T is not None:
        segments_BxT = segments_T.reshape(-1, seq)
        same = segments_BxT[:, depth:] == segments_BxT[:, :-depth]
        moved = jnp.where(jnp.pad(same, ((0, 0), (depth, 0))), moved, 0)
    return moved.reshape(-1)
