"""What a run asks the planner, and tune=compile: its result replaces mesh and slice count."""

import dataclasses

import jax.numpy as jnp
from rich.console import Console

from mstrain.hardware import TpuSlice
from mstrain.mesh import fit_to_devices, parse_mesh
from mstrain.models.config import ModelConfig
from mstrain.models.remat import planned
from mstrain.planner.compiled import Place, TuningTask
from mstrain.planner.request import Fixed, PlanRequest
from mstrain.planner.target import Pod
from mstrain.planner.tuning_cache import choose_by_compiling
from mstrain.training.config import RunConfig


def plan_request(config: RunConfig, model: ModelConfig, pod: Pod, dtype: jnp.dtype) -> PlanRequest:
    """The request of mesh=auto: the step of `config` on `pod`; `remat=auto` leaves remat open."""
    fixed = Fixed(microbatches=config.accumulate, remat=planned(config.remat), shard=config.shard)
    return PlanRequest(model, pod, (config.parallel,), config.batch, config.seq, jnp.dtype(dtype).name, fixed)


def tuned(
    config: RunConfig, model: ModelConfig, tpu_slice: TpuSlice, dtype: jnp.dtype, place: Place, console: Console
) -> RunConfig:
    """`config` with the mesh and slice count that tune=compile chooses on `tpu_slice`.

    Raises ValueError when nothing is legal or fits.
    """
    meshes = () if config.mesh == "auto" else (str(fit_to_devices(parse_mesh(config.mesh), tpu_slice.devices)),)
    task = TuningTask(
        model, config.parallel, tpu_slice, config.batch, config.seq, config.accumulate, jnp.dtype(dtype).name,
        planned(config.remat) or "full", meshes,
    )  # fmt: skip
    best = choose_by_compiling(task, place, console)
    parallel = dataclasses.replace(config.parallel, slices=best.slices)
    return dataclasses.replace(config, tune="model", mesh=best.mesh, parallel=parallel)
