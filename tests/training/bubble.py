"""The bubble of pipelined steps on emulated devices with slow layers, against that of the schedule.

`python -m tests.training.bubble [SECONDS]` puts a sleep into every layer, SECONDS (default 1) in its forward and twice
as long in its backward pass, half of it for the gradients of weights, on the device that computes the layer. Emulated
devices sleep side by side, so a step takes what its schedule takes. Measured: the part of a step of M microbatches
that another M do not add, 2 - T(2 M) / T(M); what every pass takes beside its sleep is then no bubble. Schedule: the
idle share of the ticks of `mstrain.parallel.schedules` with the same seconds.
"""

import functools
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from mstrain.data import Batch
from mstrain.mesh import emulate_devices, make_mesh, parse_mesh
from mstrain.models.config import ModelConfig
from mstrain.models.parallel import ParallelConfig
from mstrain.models.parameters import init_parameters
from mstrain.models.plan import make_plan
from mstrain.models.staged import StageLayers
from mstrain.models.stages import PipelineConfig
from mstrain.models.transformer import Transformer
from mstrain.parallel.schedules import WHOLE
from mstrain.program.pipeline import table_of
from mstrain.program.step import gradients
from tests.quick import QUICK

CASES = [("gpipe", 2, 4), ("1f1b", 2, 4), ("interleaved", 2, 4), ("zero-bubble", 2, 4)]
MODEL = ModelConfig(layers=4, width=8, heads=2, mlp_dim=8, vocab_size=16, context=8)


class Sleep:
    """How long a layer sleeps in its forward pass."""

    seconds = 0.0


def slow_layers() -> None:
    """Makes every layer of a pipeline sleep for `Sleep.seconds`, and its backward pass twice as long."""
    fast = StageLayers._apply

    def sleep(x, factor):
        def wait(x):
            time.sleep(factor * Sleep.seconds)
            return x

        return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="expand_dims")

    def apply(self, row, x_TxD, segments_T):
        spec, mesh = self.plan.groups[0][0].attention.residual.spec, self.plan.mesh
        divided = self.stages.schedule not in WHOLE

        def slow(x, spec, ahead, behind):
            def on_devices(x, factor):
                local = functools.partial(sleep, factor=factor)
                mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
                return mapped(x) if factor else x

            function = jax.custom_vjp(lambda x: on_devices(x, ahead))
            function.defvjp(lambda x: (on_devices(x, ahead), None), lambda _, dy: (on_devices(dy, behind),))
            return function(x)

        weights, *rest = row
        kernel = slow(weights["mlp"]["down"]["kernel"], P(), 0, int(divided))
        down = {**weights["mlp"]["down"], "kernel": kernel}
        y_TxD = fast(self, ({**weights, "mlp": {**weights["mlp"], "down": down}}, *rest), x_TxD, segments_T)
        return slow(y_TxD, spec, 1, 2 - divided)

    StageLayers._apply = apply


def idle_share(name: str, stages: int, microbatches: int, chunks: int) -> float:
    """Of a stage, when a forward pass takes 1 and a backward pass 2, of which weights are 1."""
    used = table_of(name, stages, microbatches, chunks).active
    seconds = (1, 2, 0) if name in WHOLE else (1, 1, 1)
    return 1 - 3 * microbatches * chunks / stages / int(np.sum(used.any(axis=2) * seconds))


def step_seconds(name: str, stages: int, microbatches: int, seconds: float) -> float:
    """Of the passes of a step whose layers sleep for so many `seconds`, after one whose layers do not."""
    mesh = make_mesh(parse_mesh(f"stage{stages}-row1-col1"))
    config = PipelineConfig(name)
    plan = make_plan(ParallelConfig("collective"), MODEL, mesh, 1, MODEL.context, pipeline=config)
    module = Transformer(MODEL, plan, MODEL.context)
    tokens = jnp.ones((microbatches, 1, MODEL.context + 1), jnp.int32)
    params = init_parameters(module, 0)
    run = jax.jit(lambda params: gradients(module, params, Batch(tokens, None, None)))
    compiled = run.lower(params).compile(QUICK)
    Sleep.seconds = 0.0
    jax.block_until_ready(compiled(params))
    Sleep.seconds = seconds
    begin = time.perf_counter()
    jax.block_until_ready(compiled(params))
    return time.perf_counter() - begin


def main() -> None:
    """Prints one row per schedule."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    slow_layers()
    print(
        "| schedule | stages | microbatches | step s | of the schedule | bubble | of the schedule |\n|" + " --- |" * 7
    )
    for name, stages, microbatches in CASES:
        step, twice = (step_seconds(name, stages, count, seconds) for count in (microbatches, 2 * microbatches))
        expected = idle_share(name, stages, microbatches, stages * (2 if name == "interleaved" else 1))
        least = 3 * seconds * microbatches * MODEL.layers / stages / (1 - expected)
        measured = 2 - twice / step
        row = (name, stages, microbatches, f"{step:.2f}", f"{least:.2f}", f"{measured:.3f}", f"{expected:.3f}")
        print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    emulate_devices(2)
    main()
