"""What the check for bad numbers adds to a step: compiled for a TPU that need not be there, or timed here.

    python -m tests.soak.guard_cost --target v5p-8 --mesh 2x2 model=gpt2 parallel=collective seq=1024 batch=16
    python -m tests.soak.guard_cost --pairs 100 --mesh 2x2 model=tiny seq=256 batch=16

The first form compares what the two compiled programs do (XLA's own account of FLOPs and bytes, in which the
body of a loop over layers counts once, so the true shares are smaller); the second runs them in turns on this
machine's emulated devices and compares the CPU time of each pair. Both leave out the watchdog, which runs in
a thread of its own; its cost per step is timed at the end.
"""

import argparse
import dataclasses
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mstrain.commands.train import load_config
from mstrain.compiler.topology import make_target
from mstrain.hardware import compiler_options
from mstrain.job.job import ALONE
from mstrain.mesh import emulate_devices, make_mesh, parse_mesh
from mstrain.models.plan import make_plan
from mstrain.models.transformer import Transformer
from mstrain.program import step as steps
from mstrain.program.optimizer import OptimizerConfig, make_optimizer, schedule_of
from mstrain.program.step import step_program
from mstrain.training.best_effort import BestEffort
from mstrain.training.watchdog import Watchdog, WatchdogConfig


def without_guard(module, optimizer):
    """`make_step` as it would be if bad numbers were let through."""

    def step(state, batch, schedule):
        (loss, *_), grads = steps.gradients(module, state["params"], batch)
        updates, moments = optimizer.update(grads, state["optimizer"], state["params"], schedule=schedule)
        params = optax.apply_updates(state["params"], updates)
        new = {"step": state["step"] + 1, "params": params, "optimizer": moments}
        return new, {"loss": loss, "grad_norm": optax.tree.norm(grads)}

    shardings = (steps.state_shardings(module, optimizer), NamedSharding(module.plan.mesh, P()))
    return jax.jit(step, donate_argnums=0, out_shardings=shardings)


def build(words: list[str], mesh, dtype, options):
    """The module, its optimizer, the shape of its batches and both compiled steps."""
    config = load_config([*words, "data=synthetic"])
    model = dataclasses.replace(config.model, vocab_size=config.model.vocab_size or 512)
    plan = make_plan(config.parallel, model, mesh, config.batch, config.seq, None)
    module = Transformer(model, plan, config.seq, dtype, config.remat)
    optimizer = make_optimizer(config.optimizer)

    given = step_program(module, optimizer, config.batch, config.accumulate).arguments
    makers = {"with": steps.make_step, "without": without_guard}
    return (
        module,
        optimizer,
        given[1],
        {name: make(module, optimizer).lower(*given).compile(options) for name, make in makers.items()},
    )


def account(programs) -> None:
    costs = {name: program.cost_analysis() for name, program in programs.items()}
    for unit in ("flops", "bytes accessed"):
        with_it, without = costs["with"][unit], costs["without"][unit]
        print(f"{unit}: {without:.4e} without, {with_it / without - 1:+.3%} with the guard")
    memory = {name: x.memory_analysis().temp_size_in_bytes / 2**20 for name, x in programs.items()}
    print(f"temporary memory: {memory['without']:.1f} MiB without, {memory['with']:.1f} MiB with the guard")


def time_pairs(module, optimizer, tokens, programs, pairs: int) -> None:
    states = {name: steps.init_state(module, optimizer, 0) for name in programs}
    numbers = np.random.default_rng(0).integers(0, module.model.vocab_size, tokens.shape).astype(np.int32)
    batch = jax.device_put(numbers, tokens.sharding)
    rates = schedule_of(OptimizerConfig(learning_rate=1e-3), 100)
    seconds = {name: [] for name in programs}
    for pair in range(pairs + 1):
        for name in sorted(programs, reverse=pair % 2 == 0):
            begun = time.process_time()
            states[name], metrics = programs[name](states[name], batch, rates)
            jax.block_until_ready((states[name], metrics))
            if pair:
                seconds[name].append(time.process_time() - begun)
    shares = [a / b - 1 for a, b in zip(seconds["with"], seconds["without"], strict=True)]
    low, middle, high = statistics.quantiles(shares, n=4)
    error = (high - low) / 1.35 * 1.25 / len(shares) ** 0.5  # of a median, from the quartiles
    print(
        f"{pairs} pairs, {statistics.median(seconds['without']) * 1e3:.0f} ms of CPU a step: the guard adds "
        f"{middle:+.2%} +- {error:.2%} (median and its standard error; quartiles {low:+.2%} {high:+.2%})"
    )


def time_watchdog(calls: int = 100_000) -> None:
    dog = Watchdog(WatchdogConfig(), pathlib.Path("."), ALONE, BestEffort(print))
    begun = time.process_time()
    for step in range(calls):
        dog(step, {"step_seconds": 1.0})
    call = (time.process_time() - begun) / calls
    begun = time.process_time()
    for _ in range(calls // 100):
        dog._bound()
    look = (time.process_time() - begun) / (calls // 100)
    print(f"watchdog: {call * 1e6:.2f} us a step, and {look * 1e6:.0f} us a second in its own thread")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="TPU slice such as v5p-8")
    parser.add_argument("--mesh", default="2x2")
    parser.add_argument("--pairs", type=int, default=0)
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    if options.target:
        target = make_target(options.target, options.mesh)
        *_, programs = build(options.words, target.mesh, jnp.bfloat16, compiler_options(target.tpu_slice.chip))
        account(programs)
    if options.pairs:
        shape = parse_mesh(options.mesh)
        emulate_devices(shape.devices)
        *parts, programs = build(options.words, make_mesh(shape), jnp.float32, None)
        account(programs)
        time_pairs(*parts, programs, options.pairs)
        time_watchdog()


if __name__ == "__main__":
    main()
