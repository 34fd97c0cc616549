"""What a run asks the planner: the mesh of mesh=auto, all keys of plan=auto, mesh and slice count of tune=compile."""

import dataclasses

import jax.numpy as jnp
from rich.console import Console

from mstrain.hardware import TpuSlice
from mstrain.hardware.pod import Pod
from mstrain.mesh import fit_to_devices, parse_mesh
from mstrain.models.config import ModelConfig
from mstrain.models.parallel import ParallelConfig
from mstrain.models.remat import planned
from mstrain.models.stages import PipelineConfig
from mstrain.planner.cost import Costed
from mstrain.planner.plan_file import AUTO_PLAN
from mstrain.planner.request import SCHEDULES, TENSOR, PlanRequest
from mstrain.planner.search import rank_meshes, search_pod
from mstrain.planner.trainer import spelled, train_keys
from mstrain.program.optimizer import OptimizerConfig
from mstrain.training.config import RunConfig
from mstrain.tuning.cache import choose_by_compiling
from mstrain.tuning.compiled import Place, TuningTask


def plan_request(config: RunConfig, model: ModelConfig, pod: Pod, dtype: jnp.dtype) -> PlanRequest:
    """The request of mesh=auto: the step of `config` on `pod`; `remat=auto` leaves remat open."""
    return PlanRequest.of(config.step_config(model, dtype), pod)


def cost_model(config: RunConfig) -> str:
    """The name of the cost model that predicts and chooses, for messages; it prices 8-bit products as bf16."""
    return "the planner's cost model" + ("" if config.products.is_full else " (products and gathers priced in bf16)")


def best_mesh(config: RunConfig, model: ModelConfig, pod: Pod, dtype: jnp.dtype) -> Costed:
    """The plan with the mesh of mesh=auto; one with stages where `config` has keys of a pipeline.

    Raises ValueError if none is legal.
    """
    found = rank_meshes(plan_request(config, model, pod, dtype), best_only=config.pipeline == PipelineConfig())
    given = [f"pipeline.{name}={value}" for name, value in vars(config.pipeline).items() if value is not None]
    staged = [costed for costed in found if costed.plan.pipeline > 1] if given else found
    if not staged:
        raise ValueError(f"mesh=auto finds no mesh with stages for {' '.join(given)}. Remove it, or type a mesh=.")
    return staged[0]


def with_plan(config: RunConfig, model: ModelConfig, pod: Pod, dtype: jnp.dtype, console: Console) -> RunConfig:
    """For plan=auto, `config` with the keys of the best plan on `pod`; those that differ from their defaults stay.

    Raises ValueError if no plan fits.
    """
    if config.plan != AUTO_PLAN:
        return config
    open_remat = config.remat == "none" and not config.offload
    request, pipeline = plan_request(config, model, pod, dtype), config.pipeline
    fixed = dataclasses.replace(
        request.fixed,
        microbatches=config.accumulate if config.accumulate > 1 else None,
        remat=None if open_remat else planned(config.remat, config.offload),
        shard=config.shard if config.shard != "none" else None,
        schedule=pipeline.schedule or (SCHEDULES[0] if pipeline.layers else None),
        interleave=request.fixed.interleave if pipeline.layers else pipeline.interleave,
        staged=config.mesh == "auto" and pipeline != PipelineConfig(),
    )
    if config.mesh != "auto":
        fixed = fixed.on(fit_to_devices(parse_mesh(config.mesh), pod.devices))
    chosen = config.parallel != ParallelConfig()
    parallel = (config.parallel,) if chosen else tuple(map(ParallelConfig, TENSOR))
    request = dataclasses.replace(request, parallel=parallel, fixed=fixed)
    with console.status("Searching plans for plan=auto"):
        result = search_pod(request, best_only=True, train=True)
    if not result.trainable:
        raise ValueError(f"plan=auto: {result.best.why_not_trainable}, and no other plan fits. Type plan=null.")
    plan, seconds = result.trainable[0].plan, result.trainable[0].seconds
    keys = {name: str(value) for name, value in train_keys(plan, pod.slices).items()}
    console.print(
        f"[bold]Plan[/]   {spelled(keys)}, {1e3 * seconds:,.1f} ms a step by {cost_model(config)}", soft_wrap=True
    )
    interleave = plan.interleave if plan.chunks > 1 else None
    stages = PipelineConfig(plan.schedule, interleave, pipeline.layers)
    return dataclasses.replace(
        config, plan=None, mesh=keys["mesh"], parallel=plan.parallel, accumulate=plan.microbatches,
        remat=keys["remat"], offload=keys.get("offload"), shard=plan.shard,
        pipeline=stages if plan.pipeline > 1 else pipeline,
    )  # fmt: skip


def tuned(
    config: RunConfig, model: ModelConfig, tpu_slice: TpuSlice, dtype: jnp.dtype, place: Place, console: Console
) -> RunConfig:
    """`config` with the mesh and slice count that tune=compile chooses on `tpu_slice`.

    Raises ValueError when nothing is legal or fits.
    """
    meshes = () if config.mesh == "auto" else (str(fit_to_devices(parse_mesh(config.mesh), tpu_slice.devices)),)
    given = config.optimizer  # rates and factors change no program: benchmark.py, which has none, asks the same
    optimizer = OptimizerConfig(given.name, moments=given.moments, gradients=given.gradients, rounding=given.rounding)
    step = dataclasses.replace(config.step_config(model, dtype), optimizer=optimizer)
    task = TuningTask(step, tpu_slice, meshes)
    best = choose_by_compiling(task, place, console)
    parallel = dataclasses.replace(config.parallel, slices=best.slices)
    return dataclasses.replace(config, tune="model", mesh=best.mesh, parallel=parallel)
