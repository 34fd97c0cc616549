"""Optimizers and learning-rate schedules of Optax, with clipping by global norm and linear warm-up.

Updates are elementwise, so padding and the storage order of weights do not matter; moments are saved as weights are.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from mstrain.checks import one_of

OPTIMIZERS = ("adamw", "lion")
SCHEDULES = ("cosine", "linear", "constant", "inverse_sqrt", "wsd")
MOMENTS = {"f32": jnp.float32, "bf16": jnp.bfloat16}


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and schedule of the learning rate, with clipping by global norm and linear warm-up."""

    name: str = "adamw"
    """`adamw`, or `lion`, which has one moment and a smaller learning rate."""
    schedule: str = "cosine"
    """Learning rate after the warm-up: `cosine`, `linear`, `constant`, `inverse_sqrt` of the step, or `wsd` (constant,
    then linear over the last `decay_share` of the steps)."""
    decay_share: float = 0.1
    """Share of the steps over which `wsd` decays, from 0 to 1."""
    moments: str = "f32"
    """Dtype in which the first moment is stored: `f32` or `bf16`. The second moment of AdamW is float32."""
    learning_rate: float | None = None
    """Peak learning rate, reached after `warmup` steps. Null takes 0.46 / model.width, which follows the GPT-3 paper's
    Table 2.1 from 125M to 175B within a factor of 1.7."""
    warmup: int = 50
    """Number of steps of linear warm-up."""
    final_fraction: float = 0.1
    """Fraction of the peak learning rate at the last step of `cosine`, `linear` and `wsd`, from 0 to 1."""
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
        for field, allowed in (("name", OPTIMIZERS), ("schedule", SCHEDULES), ("moments", tuple(MOMENTS))):
            one_of(f"optimizer.{field}", getattr(self, field), allowed)
        for field in ("learning_rate", "clip", "epsilon"):
            if getattr(self, field) is not None and not getattr(self, field) > 0:
                raise ValueError(f"optimizer.{field}={getattr(self, field)} must be above 0.")
        if self.warmup < 0 or self.weight_decay < 0:
            names = "optimizer.warmup and optimizer.weight_decay"
            raise ValueError(f"{names} cannot be negative. Type 0 for none.")
        for field in ("b1", "b2", "final_fraction", "decay_share"):
            if not 0 <= getattr(self, field) <= 1:
                raise ValueError(f"optimizer.{field}={getattr(self, field)} must lie between 0 and 1.")

    def for_width(self, width: int) -> "OptimizerConfig":
        """With a learning rate, for a model of this width."""
        return self if self.learning_rate else dataclasses.replace(self, learning_rate=0.46 / width)


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Linear warm-up, then `config.schedule`, which ends at step `steps`.

    The first update has `1 / (warmup + 1)` of the peak rate, because a rate of 0 would waste a batch.
    """
    peak = config.learning_rate
    assert peak is not None, "set by for_width"
    warmup = min(config.warmup, max(steps - 1, 0))
    decay = _after_warmup(config, peak, warmup, max(steps - warmup, 1))
    if not warmup:
        return decay
    return optax.join_schedules([optax.linear_schedule(peak / (warmup + 1), peak, warmup), decay], [warmup])


def _after_warmup(config: OptimizerConfig, peak: float, warmup: int, steps: int) -> optax.Schedule:
    last, cooldown = peak * config.final_fraction, max(round(config.decay_share * (warmup + steps)), 1)
    if config.schedule == "cosine":
        return optax.cosine_decay_schedule(peak, steps, config.final_fraction)
    if config.schedule == "linear":
        return optax.linear_schedule(peak, last, steps)
    if config.schedule == "wsd":
        cooldown = min(cooldown, steps)
        return optax.linear_schedule(peak, last, cooldown, transition_begin=steps - cooldown)
    if config.schedule == "constant":
        return optax.constant_schedule(peak)
    begin = max(warmup, 1)
    return lambda step: peak * jnp.sqrt(begin / (begin + jnp.maximum(step, 0)))


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Clipping and the whole update; moments are float32 like the parameters, or as `config.moments` says."""
    shared = {
        "learning_rate": learning_rate(config, steps), "b1": config.b1, "b2": config.b2,
        "mu_dtype": MOMENTS[config.moments], "weight_decay": config.weight_decay, "mask": decay_mask,
    }  # fmt: skip
    update = optax.lion(**shared) if config.name == "lion" else optax.adamw(eps=config.epsilon, **shared)
    return optax.chain(optax.clip_by_global_norm(config.clip), update)


def decay_mask(params):
    """True for kernels and embedding tables, false for norm scales and biases."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in ("kernel", "table"), params)
