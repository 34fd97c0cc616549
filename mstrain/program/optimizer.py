"""AdamW with clipping by global norm, linear warm-up and cosine decay."""

import dataclasses

import jax
import optax


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with clipping by global norm, linear warm-up and cosine decay."""

    learning_rate: float | None = None
    """Peak learning rate, reached after `warmup` steps. Null takes 0.46 / model.width, which follows the GPT-3 paper's
    Table 2.1 from 125M to 175B within a factor of 1.7."""
    warmup: int = 50
    """Number of steps of linear warm-up."""
    final_fraction: float = 0.1
    """Fraction of the peak learning rate at the last step of the cosine decay, from 0 to 1."""
    b1: float = 0.9
    """Decay rate of the first moment, from 0 to 1."""
    b2: float = 0.95
    """Decay rate of the second moment, from 0 to 1."""
    epsilon: float = 1e-8
    """Constant added to the square root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay of kernels and embedding tables. Norm scales and biases have none."""
    clip: float = 1.0
    """Largest global gradient norm. Larger gradients are scaled down to it."""

    def __post_init__(self):
        for field in ("learning_rate", "clip", "epsilon"):
            if getattr(self, field) is not None and not getattr(self, field) > 0:
                raise ValueError(f"optimizer.{field}={getattr(self, field)} must be above 0.")
        if self.warmup < 0 or self.weight_decay < 0:
            names = "optimizer.warmup and optimizer.weight_decay"
            raise ValueError(f"{names} cannot be negative. Type 0 for none.")
        for field in ("b1", "b2", "final_fraction"):
            if not 0 <= getattr(self, field) <= 1:
                raise ValueError(f"optimizer.{field}={getattr(self, field)} must lie between 0 and 1.")

    def for_width(self, width: int) -> "OptimizerConfig":
        """With a learning rate, for a model of this width."""
        return self if self.learning_rate else dataclasses.replace(self, learning_rate=0.46 / width)


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Linear warm-up, then a cosine that ends at step `steps`.

    The first update has `1 / (warmup + 1)` of the peak rate, because a rate of 0 would waste a batch.
    """
    peak = config.learning_rate
    assert peak is not None, "set by for_width"
    warmup = min(config.warmup, max(steps - 1, 0))
    if not warmup:
        return optax.cosine_decay_schedule(peak, max(steps, 1), config.final_fraction)
    first, last = peak / (warmup + 1), peak * config.final_fraction
    return optax.warmup_cosine_decay_schedule(first, peak, warmup, max(steps, 1), last)


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """The whole update, first moment and second moment in float32 like the parameters."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(
            learning_rate(config, steps),
            b1=config.b1,
            b2=config.b2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=decay_mask,
        ),
    )


def decay_mask(params):
    """True for kernels and embedding tables, false for norm scales and biases."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in ("kernel", "table"), params)
