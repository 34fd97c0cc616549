"""The bubble of pipelined steps on emulated devices with slow layers, against that of the simulator.

`python -m tests.training.bubble [SECONDS]` puts a sleep into every layer, SECONDS (default 1) in its forward and twice
as long in its backward pass, half of it for the gradients of weights, on the device that computes the layer. Emulated
devices sleep side by side, so a step takes what its schedule takes. Measured: the part of a step of M microbatches
that another M do not add, 2 - T(2 M) / T(M); what every pass takes beside its sleep is then no bubble. Simulated: the
same passes in the step program that the simulator writes for a plan, and the part of it in which a stage idles.
"""

import functools
import sys
import time

import jax
import jax.numpy as jnp
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
from mstrain.parallel.schedules import BACKWARD, DIRECTIONS, FORWARD, WEIGHTS, WHOLE, schedule, ticks, with_waits
from mstrain.program.step import gradients
from mstrain.simulator.cluster import Cluster, Device, Switch
from mstrain.simulator.pipeline import PipelineStep
from mstrain.simulator.placement import LOCAL, Degrees
from mstrain.simulator.program import OpSpec, timed
from mstrain.simulator.simulate import simulate_step
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


class Sleeping(PipelineStep):
    """Passes that take as long as their layers sleep, and messages that take no time."""

    def __init__(self, name: str, stages: int, microbatches: int, chunks: int, seconds: float):
        super().__init__(Degrees(pipeline=stages, microbatches=microbatches, interleave=chunks // stages), chunks)
        each = seconds * MODEL.layers / chunks
        self.seconds = [factor * each for factor in ((1, 2) if name in WHOLE else (1, 1, 1))]
        self.made, self.received = (
            [[self.slots.value(1, self.stage(chunk)) for chunk in range(chunks)] for _ in DIRECTIONS] for _ in range(2)
        )

    def _pass(self, chunk: int, direction: int, *inputs: int) -> None:
        spec, made = timed("Profiled", self.seconds[direction]), self.made[direction][chunk]
        self.add(spec, LOCAL, self.stage(chunk), inputs, (made,))

    def forward(self, chunk: int) -> None:
        self._pass(chunk, FORWARD, self.received[FORWARD][chunk])

    def backward(self, chunk: int) -> None:
        self._pass(chunk, BACKWARD, self.made[FORWARD][chunk], self.received[BACKWARD][chunk])

    def weight_gradients(self, chunk: int) -> None:
        self._pass(chunk, WEIGHTS, self.made[BACKWARD][chunk])

    def wait(self, chunk: int, direction: int) -> None:
        self.add(timed("Profiled", self.seconds[direction]), LOCAL, self.stage(chunk))

    def messages(self, chunk: int, other: int, direction: int) -> list[tuple[OpSpec, int, int]]:
        return [(OpSpec("Send", ((1,),), 1), self.made[direction][chunk], self.received[direction][other])]


def simulated(name: str, stages: int, microbatches: int, seconds: float) -> tuple[float, float]:
    """Seconds of a step whose layers sleep for so many `seconds`, and the part in which a stage idles."""
    chunks = stages * (2 if name == "interleaved" else 1)
    degrees = name, stages, microbatches, chunks
    order = schedule(*degrees) if name in WHOLE else with_waits(ticks(*degrees), stages)
    cluster = Cluster.homogeneous(stages, Device(1.0, 1.0), Switch(1e30))
    step = simulate_step(Sleeping(*degrees, seconds).write(order), cluster).seconds
    return step, 1 - 3 * seconds * microbatches * MODEL.layers / stages / step


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
    print("| schedule | stages | microbatches | step s | simulated | bubble | simulated |\n|" + " --- |" * 7)
    for name, stages, microbatches in CASES:
        step, twice = (step_seconds(name, stages, count, seconds) for count in (microbatches, 2 * microbatches))
        least, expected = simulated(name, stages, microbatches, seconds)
        measured = 2 - twice / step
        row = (name, stages, microbatches, f"{step:.2f}", f"{least:.2f}", f"{measured:.3f}", f"{expected:.3f}")
        print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    emulate_devices(2)
    main()
