"""Optimizers and learning-rate schedules of Optax, with clipping by global norm and linear warm-up.

Updates of AdamW and Lion are elementwise, and those of Muon (`mstrain.program.muon`) follow permutations, so padding
and the storage order of weights do not matter; moments are saved as weights are. Adafactor runs on canonical parameters
(`mstrain.program.canonical_update`).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mstrain.checks import one_of
from mstrain.models.parameters import MTP
from mstrain.program.canonical_update import OnCanonical, per_layer
from mstrain.program.muon import orthogonalize
from mstrain.program.rounding import ROUNDINGS, GradientSums, moments_in_bf16

OPTIMIZERS = ("adamw", "lion", "adafactor", "muon")
SCHEDULES = ("cosine", "linear", "constant", "inverse_sqrt", "wsd")
_UNREAD = {  # key -> its value -> keys that have no effect then
    "name": {"adafactor": ("b1", "b2"), "lion": ("epsilon",)},
    "schedule": {
        "cosine": ("decay_share",),
        "linear": ("decay_share",),
        "constant": ("decay_share", "final_fraction"),
        "inverse_sqrt": ("decay_share", "final_fraction"),
    },
}
MOMENTS = ("f32", "bf16")
SMALLEST_FACTORED = 32  # both dims of a matrix whose second moment Adafactor factors


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and schedule of the learning rate, with clipping by global norm and linear warm-up."""

    name: str = "adamw"
    """`adamw`; `lion`, which has one moment and needs a smaller learning rate; `adafactor`, which has no first moment
    and stores means over rows and columns of the second; or `muon`, which orthogonalizes the momentum of layers'
    kernels and uses AdamW for all other parameters."""
    schedule: str = "cosine"
    """Learning rate after the warm-up: `cosine`, `linear`, `constant`, `inverse_sqrt` of the step, or `wsd` (constant,
    then linear over the last `decay_share` of the steps)."""
    decay_share: float = 0.1
    """Fraction of the steps over which `wsd` decays, from 0 to 1."""
    moments: str = "f32"
    """Dtype in which moments are stored: `f32` or `bf16`. They are computed in float32."""
    gradients: str = "f32"
    """Dtype in which the gradients of kernels and tables are summed over `accumulate` microbatches: `f32` or `bf16`."""
    rounding: str = "nearest"
    """Rounding of moments=bf16 and gradients=bf16: `nearest`, or `stochastic`, which also keeps changes of less than
    the last bit, on average."""
    learning_rate: float | None = None
    """Peak learning rate, reached after `warmup` steps. Null takes 0.46 / model.width, which follows the GPT-3 paper's
    Table 2.1 from 125M to 175B within a factor of 1.7."""
    warmup: int = 50
    """Number of steps of linear warm-up; at most all but the last step of the run."""
    final_fraction: float = 0.1
    """Fraction of the peak learning rate at the last step of `cosine`, `linear` and `wsd`, from 0 to 1."""
    b1: float = 0.9
    """Decay rate of the first moment, from 0 to 1."""
    b2: float = 0.95
    """Decay rate of the second moment, from 0 to 1."""
    epsilon: float = 1e-8
    """Constant added to the square root of the second moment; Adafactor adds its square to squared gradients."""
    weight_decay: float = 0.1
    """Decoupled weight decay of kernels and embedding tables. Norm scales and biases have none."""
    clip: float = 1.0
    """Largest global gradient norm. Larger gradients are scaled down to it."""

    def __post_init__(self):
        fields = {
            "name": OPTIMIZERS,
            "schedule": SCHEDULES,
            "moments": MOMENTS,
            "gradients": MOMENTS,
            "rounding": ROUNDINGS,
        }
        for field, allowed in fields.items():
            one_of(f"optimizer.{field}", getattr(self, field), allowed)
        if self.name == "adafactor" and self.moments != "f32":
            raise ValueError(
                f"optimizer.moments={self.moments} has no effect with optimizer.name=adafactor, whose moments are "
                "small. Remove it, or type optimizer.name=adamw."
            )
        if self.rounding != "nearest" and self.moments == self.gradients == "f32":
            raise ValueError(
                f"optimizer.rounding={self.rounding} has no effect with optimizer.moments=f32 and "
                "optimizer.gradients=f32. Remove it, or type optimizer.moments=bf16."
            )
        self._check_effects()
        for field in ("learning_rate", "clip", "epsilon"):
            if getattr(self, field) is not None and not getattr(self, field) > 0:
                raise ValueError(f"optimizer.{field}={getattr(self, field)} must be above 0.")
        if self.warmup < 0 or self.weight_decay < 0:
            names = "optimizer.warmup and optimizer.weight_decay"
            raise ValueError(f"{names} cannot be negative. Type 0 for none.")
        for field in ("b1", "b2", "final_fraction", "decay_share"):
            if not 0 <= getattr(self, field) <= 1:
                raise ValueError(f"optimizer.{field}={getattr(self, field)} must lie between 0 and 1.")

    def _check_effects(self) -> None:
        """Raises ValueError for a value that the optimizer or the schedule does not read."""
        for key, values in _UNREAD.items():
            for field in values.get(chosen := getattr(self, key), ()):
                if (value := getattr(self, field)) != getattr(OptimizerConfig, field):
                    raise ValueError(
                        f"optimizer.{field}={value} has no effect with optimizer.{key}={chosen}. Remove it, or type "
                        f"another optimizer.{key}=."
                    )

    def sums(self, seed: int) -> GradientSums:
        """How a step sums gradients."""
        return GradientSums(None if self.gradients == "f32" else self.rounding, seed)

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


def make_optimizer(config: OptimizerConfig, seed: int = 0) -> optax.GradientTransformationExtraArgs:
    """Clipping and the whole update; moments are float32 like the parameters, or have the dtype of `config.moments`.

    `update(gradients, moments, params, schedule=schedule_of(config, steps))`: the learning rate is that of the update's
    number, which the moments count. Muon's takes the `module` of the parameters too, and stochastic rounding, of which
    `seed` is, `module` and `step`: `mstrain.program.canonical_update.update` passes them.
    """
    clip = optax.clip_by_global_norm(config.clip)
    if config.name == "adafactor":
        return OnCanonical(*optax.chain(clip, per_layer(_adafactor(config))))
    update = _muon(config) if config.name == "muon" else _elementwise(config)
    if config.moments == "bf16":
        update = moments_in_bf16(update, config.rounding, seed)
    return optax.chain(clip, update)  # nested as in optax.adamw: the state of a checkpoint has this structure


def _elementwise(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    lion = config.name == "lion"
    scale = (
        optax.scale_by_lion(config.b1, config.b2) if lion else optax.scale_by_adam(config.b1, config.b2, config.epsilon)
    )
    return optax.chain(scale, *_decay_and_rate(config))


def _adafactor(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    """Shazeer and Stern (2018) without the scale of parameters: with learning rates and decay as of AdamW."""
    return optax.chain(
        optax.scale_by_factored_rms(min_dim_size_to_factor=SMALLEST_FACTORED, epsilon=config.epsilon**2),
        optax.clip_by_block_rms(1.0), *_decay_and_rate(config),
    )  # fmt: skip


def _muon(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    of_kernels = optax.chain(optax.trace(config.b1, nesterov=True), orthogonalize(), *_decay_and_rate(config))
    others = _elementwise(dataclasses.replace(config, name="adamw"))
    return optax.partition({"muon": of_kernels, "adamw": others}, _labels)


def _labels(params):
    """Kernels of layers are updated by Muon, all other parameters by AdamW."""

    def label(path, _):
        return "muon" if path[0].key.startswith(("blocks_", "dense_", MTP)) and path[-1].key == "kernel" else "adamw"

    return jax.tree_util.tree_map_with_path(label, params)


def _decay_and_rate(config: OptimizerConfig):
    return optax.add_decayed_weights(config.weight_decay, decay_mask), _scale_by_schedule(config.schedule)


def _scale_by_schedule(kind: str) -> optax.GradientTransformationExtraArgs:
    """`optax.scale_by_learning_rate` with the numbers of its schedule as an argument of `update`."""

    def init(params):
        del params
        return optax.ScaleByScheduleState(jnp.zeros([], jnp.int32))

    def update(updates, state: Any, params=None, **place):
        del params
        rate = -rate_of(kind, place["schedule"], state.count)
        scaled = jax.tree.map(lambda x: rate.astype(x.dtype) * x, updates)
        return scaled, optax.ScaleByScheduleState(optax.safe_increment(state.count))

    return optax.GradientTransformationExtraArgs(init, update)


def decay_mask(params):
    """True for kernels, routers and embedding tables, false for norm scales and biases."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in ("kernel", "table", "router"), params)
