"""The bubble of pipelined steps on emulated devices with slow layers, against that of the schedule.

`python -m tests.training.bubble [SECONDS]` puts a sleep into every layer, SECONDS (default 1) in its forward and twice
as long in its backward pass, on the device that computes the layer. Emulated devices sleep side by side, so a step
takes what its schedule takes. Measured: 1 - (busy time of a stage) / (time of a step). Schedule: the idle share of the
tasks of `mstrain.parallel.schedules.schedule`, which the simulator runs, with the same seconds.
"""

import functools
import sys
import time

import jax
import jax.numpy as jnp

from mstrain.data import Batch
from mstrain.mesh import emulate_devices, make_mesh, parse_mesh
from mstrain.models.config import ModelConfig
from mstrain.models.parallel import ParallelConfig
from mstrain.models.parameters import init_parameters
from mstrain.models.plan import make_plan
from mstrain.models.staged import StageLayers
from mstrain.models.stages import PipelineConfig
from mstrain.models.transformer import Transformer
from mstrain.parallel.schedules import schedule
from mstrain.program.step import gradients

CASES = [("gpipe", 2, 4), ("1f1b", 2, 4), ("interleaved", 2, 4)]
MODEL = ModelConfig(layers=4, width=8, heads=2, mlp_dim=8, vocab_size=16, context=8)


def slow_layers(seconds: float) -> None:
    """Makes every layer of a pipeline sleep, and its backward pass twice as long."""
    fast = StageLayers._apply

    def sleep(x, factor):
        def wait(x):
            time.sleep(factor * seconds)
            return x

        return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="expand_dims")

    def apply(self, row, x_TxD, segments_T):
        spec, mesh = self.plan.groups[0][0].attention.residual.spec, self.plan.mesh

        def on_devices(x, factor):
            local = functools.partial(sleep, factor=factor)
            return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)

        slow = jax.custom_vjp(lambda x: on_devices(x, 1))
        slow.defvjp(lambda x: (on_devices(x, 1), None), lambda _, dy: (on_devices(dy, 2),))
        return slow(fast(self, row, x_TxD, segments_T))

    StageLayers._apply = apply


def idle_share(name: str, stages: int, microbatches: int, chunks: int) -> float:
    """Of the first stage, when a forward pass takes 1 and a backward pass 2."""
    free, done = [0] * stages, {}
    for step in schedule(name, stages, microbatches, chunks):
        for task in step:
            neighbor = (task.chunk + (1 if task.direction else -1), task.direction, task.microbatch)
            free[task.stage] = max(free[task.stage], done.get(neighbor, 0)) + 1 + task.direction
            done[task[1:]] = free[task.stage]
    return 1 - 3 * microbatches * chunks / stages / max(free)


def step_seconds(name: str, stages: int, microbatches: int) -> float:
    """Of the forward and backward passes of a step, the second one of two."""
    mesh = make_mesh(parse_mesh(f"stage{stages}-row1-col1"))
    config = PipelineConfig(name)
    plan = make_plan(ParallelConfig("collective"), MODEL, mesh, 1, MODEL.context, pipeline=config)
    module = Transformer(MODEL, plan, MODEL.context)
    tokens = jnp.ones((microbatches, 1, MODEL.context + 1), jnp.int32)
    params = init_parameters(module, 0)
    run = jax.jit(lambda params: gradients(module, params, Batch(tokens, None, None)))
    compiled = run.lower(params).compile()
    jax.block_until_ready(compiled(params))
    begin = time.perf_counter()
    jax.block_until_ready(compiled(params))
    return time.perf_counter() - begin


def main() -> None:
    """Prints one row per schedule."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    slow_layers(seconds)
    print("| schedule | stages | microbatches | step s | bubble measured | of the schedule |\n|" + " --- |" * 6)
    for name, stages, microbatches in CASES:
        step = step_seconds(name, stages, microbatches)
        busy = 3 * seconds * microbatches * MODEL.layers / stages
        chunks = stages * (2 if name == "interleaved" else 1)
        expected = idle_share(name, stages, microbatches, chunks)
        row = (name, stages, microbatches, f"{step:.2f}", f"{1 - busy / step:.3f}", f"{expected:.3f}")
        print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    emulate_devices(2)
    main()
