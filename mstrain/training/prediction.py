"""The predicted time of a training step, which the run prints with the measured one."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from mstrain.hardware import Chip, tpu_slice_of
from mstrain.hardware.calibration import load_calibration
from mstrain.hardware.pod import pod_of
from mstrain.job.job import Job
from mstrain.mesh import shape_of
from mstrain.models.remat import planned
from mstrain.models.transformer import Transformer
from mstrain.planner.cost import cost_step
from mstrain.planner.plan import PodPlan
from mstrain.training.config import RunConfig
from mstrain.training.tuned import cost_model, plan_request
from mstrain.tuning.calibrated import predict_step

TOLERANCE = 0.2  # of a prediction; a larger difference is reported with its terms


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Seconds of one step: `terms` add up to them. `source` is the model that predicts."""

    terms: dict[str, float]
    source: str

    @property
    def seconds(self) -> float:
        return sum(self.terms.values())

    def __str__(self) -> str:
        parts = ", ".join(
            f"{name.replace('_', ' ')} {1e3 * value:,.1f}" for name, value in self.terms.items() if value > 0
        )
        return f"{1e3 * self.seconds:,.1f} ms a step ({parts}), by {self.source}"


def check_calibration(config: RunConfig) -> None:
    """Raises ValueError when `calibration=` is a bad file, or one of other devices than those present."""
    if config.calibration:
        kind = jax.devices()[0].device_kind
        load_calibration(config.calibration).check_device((kind,), config.calibration)


def predict(
    config: RunConfig, module: Transformer, chip: Chip | None, job: Job, text: Callable[[], str]
) -> Prediction | None:
    """The prediction for a run; None when its devices are unknown.

    For emulated devices it needs `calibration=` and predicts from the compiled program, `text()`.
    Nothing is compiled for it: reading the program takes less than a second, the cost model milliseconds.
    """
    shape = shape_of(module.plan.mesh)
    if jax.devices()[0].platform == "cpu":
        if config.calibration is None or job.processes > 1:
            return None
        try:
            calibration = load_calibration(config.calibration)
            calibration.check_dtype(jnp.dtype(module.dtype).name, config.calibration)
            terms = predict_step(text(), shape.axes, calibration)
        except ValueError as error:
            job.log(f"no prediction of step times: {error}")
            return None
        return Prediction(dataclasses.asdict(terms), f"{config.calibration} and the compiled program")
    if chip is None:
        return None
    remat, stages = planned(module.remat, module.offload) or "none", module.plan.stages
    plan = PodPlan.on(shape, config.parallel, config.accumulate, remat, config.shard, stages)
    try:
        pod = pod_of(tpu_slice_of(jax.devices()) or chip, shape.devices)
        pod = pod.calibrated(config.calibration, jnp.dtype(module.dtype).name)
        costed = cost_step(plan_request(config, module.model, pod, module.dtype), plan)
    except ValueError:  # a figure of the chip is unknown
        return None
    if not costed:
        return None
    source = f"{cost_model(config)} with {config.calibration or 'the table of chips'}"
    return Prediction(dataclasses.asdict(costed.terms), source)


@dataclasses.dataclass(frozen=True)
class Measured:
    """Mean seconds of a step, and of it: waiting for input, and CPU time of the process over the cores."""

    seconds: float
    waited: float
    busy: float


def compare(prediction: Prediction, measured: Measured, emulated: bool) -> list[str]:
    """Lines that put a measured step beside its prediction.

    Where they differ by more than `TOLERANCE`: the term that differs, as far as that is known without a profile.
    """
    predicted, seconds = prediction.seconds, measured.seconds
    ratio = predicted / seconds
    lines = [f"predicted {1e3 * predicted:,.1f} ms a step, measured {1e3 * seconds:,.1f} (ratio {ratio:.2f})"]
    if _agree(predicted, seconds):
        return lines
    too_large = [name.replace("_", " ") for name, value in prediction.terms.items() if value > seconds]
    largest = max(prediction.terms, key=lambda name: prediction.terms[name])
    if measured.waited > 0 and _agree(predicted, seconds - measured.waited):
        off = f"input: a step waits for it {1e3 * measured.waited:,.1f} ms, which the prediction does not include."
    elif emulated and seconds - measured.busy > abs(measured.busy - predicted):
        off = (
            f"the CPU cores. This process used them for {1e3 * measured.busy:,.1f} ms a step, as predicted "
            f"(ratio {predicted / measured.busy:.2f}); for the rest of the step they were idle or ran other programs."
        )
    elif too_large:
        off = f"{' and '.join(too_large)}, predicted to take longer than the whole measured step."
    else:
        off = (
            f"a term that cannot be separated without a profile (profile.start=3). The largest predicted one is "
            f"{largest.replace('_', ' ')}, {1e3 * prediction.terms[largest]:,.1f} ms."
        )
        off += f" This process used the CPU cores for {1e3 * measured.busy:,.1f} ms a step." if emulated else ""
    return [*lines, f"The prediction differs by more than {TOLERANCE:.0%}. Cause: {off}"]


def _agree(predicted: float, measured: float) -> bool:
    return measured > 0 and abs(predicted / measured - 1) <= TOLERANCE
