"""Applies tune=compile to a run: calls the planner and replaces mesh and slice count by its result."""

import dataclasses

import jax.numpy as jnp
from rich.console import Console

from mstrain.hardware import TpuSlice
from mstrain.mesh import fit_to_devices, parse_mesh
from mstrain.models.config import ModelConfig
from mstrain.models.remat import planned
from mstrain.planner.compiled import Place, TuningTask
from mstrain.planner.tuning_cache import choose_by_compiling
from mstrain.training.config import RunConfig


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
