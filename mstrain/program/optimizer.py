"""Optimizers and learning-rate schedules of Optax, with clipping by global norm and linear warm-up.

Updates are elementwise, so padding and the storage order of weights do not matter; moments are saved as weights are.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
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


def schedule_of(config: OptimizerConfig, steps: int) -> np.ndarray:
    """The numbers of the schedule that ends at step `steps`, float32 [5]: an argument of the compiled step.

    They are the peak rate, the updates of warm-up, the updates at the peak rate before the decay, those of the decay,
    and the final fraction. As constants, another `steps=` would compile another program.
    """
    assert config.learning_rate is not None, "set by for_width"
    warmup = min(config.warmup, max(steps - 1, 0))
    decay = max(steps - warmup, 1)
    hold = max(decay - max(round(config.decay_share * (warmup + decay)), 1), 0) if config.schedule == "wsd" else 0
    return np.array([config.learning_rate, warmup, hold, decay - hold, config.final_fraction], np.float32)


def rate_of(kind: str, schedule, count):
    """The learning rate of update `count` (from 0) by the numbers of `schedule_of` and the SCHEDULES name `kind`.

    Linear warm-up to the peak comes first; the first update has `1 / (warmup + 1)` of it, because a rate of 0 would
    waste a batch. `count` is an integer or an array of them; float32 of its shape.
    """
    xp = jnp if isinstance(count, jax.Array) else np
    peak, warmup, hold, decay, last = schedule
    after = xp.maximum(count - warmup, 0)
    share = xp.clip((after - hold) / decay, 0, 1)
    begin = xp.maximum(warmup, 1)
    fraction = {
        "cosine": last + (1 - last) * (1 + xp.cos(np.float32(np.pi) * share)) / 2,
        "linear": 1 - (1 - last) * share,
        "wsd": 1 - (1 - last) * share,
        "constant": xp.ones_like(share),
        "inverse_sqrt": xp.sqrt(begin / (begin + after)),
    }[kind]
    return peak * xp.where(count < warmup, (count + 1) / (warmup + 1), fraction)


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    """Clipping and the whole update; moments are float32 like the parameters, or as `config.moments` says.

    `update(gradients, moments, params, schedule=schedule_of(config, steps))`: the learning rate is that of the update's
    number, which the moments count.
    """
    shared = {"b1": config.b1, "b2": config.b2, "mu_dtype": MOMENTS[config.moments]}
    lion = config.name == "lion"
    scale = optax.scale_by_lion(**shared) if lion else optax.scale_by_adam(eps=config.epsilon, **shared)
    decay = optax.add_decayed_weights(config.weight_decay, decay_mask)
    # Nested as in optax.adamw: the state of a checkpoint has this structure.
    return optax.chain(
        optax.clip_by_global_norm(config.clip), optax.chain(scale, decay, _scale_by_schedule(config.schedule))
    )


def _scale_by_schedule(kind: str) -> optax.GradientTransformationExtraArgs:
    """`optax.scale_by_learning_rate` with the numbers of its schedule as an argument of `update`."""

    def init(params):
        del params
        return optax.ScaleByScheduleState(jnp.zeros([], jnp.int32))

    def update(updates, state, params=None, **extra):
        del params
        rate = -rate_of(kind, extra["schedule"], state.count)
        scaled = jax.tree.map(lambda x: rate.astype(x.dtype) * x, updates)
        return scaled, optax.ScaleByScheduleState(optax.safe_increment(state.count))

    return optax.GradientTransformationExtraArgs(init, update)


def decay_mask(params):
    """True for kernels and embedding tables, false for norm scales and biases."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in ("kernel", "table"), params)
