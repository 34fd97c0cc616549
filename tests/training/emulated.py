"""What emulated devices cost: CPU seconds of a step of equal work on one device and on meshes of a CPU.

`python -m tests.training.emulated [key=value ...]` takes the median of a few steps of train.py's model on every mesh,
and of the same model in Flax's own layers with plain JAX, each in a process of its own. CPU seconds of all threads
count, so another program on the machine changes them less than wall time.
"""

import multiprocessing
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor

import jax

import mstrain
from mstrain.benchmarks.peers import flax_model
from mstrain.benchmarks.peers.task import Task
from mstrain.commands.train import load_config

PLAIN, STEPS = "plain JAX", 5
MEANING = {
    PLAIN: "",
    "1x1": "our layers",
    "8x1x1": "eight copies of a batch of two, one sum of gradients",
    "2x4": "gathers and reduce_scatters of rows and columns; the default on a CPU",
}


def seconds_of(mesh: str, keys: list[str]) -> float:
    """Median CPU seconds of a step."""
    if mesh == PLAIN:
        config = load_config(["run_dir=none", "model.vocab_size=256", *keys])
        plain = flax_model.make(Task("flax", config.model, config.batch, config.seq, "f32"))
        run, wait = plain.step, plain.wait
    else:
        state, step, feed = mstrain.trainer(*keys, f"mesh={mesh}")
        batch = feed(0)

        def run():
            nonlocal state
            state, metrics = step(state, batch)
            return metrics["loss"]

        wait = jax.block_until_ready
    wait(run())
    found = []
    for _ in range(STEPS):
        begin = time.process_time()
        wait(run())
        found.append(time.process_time() - begin)
    return statistics.median(found)


def main(keys: list[str]) -> None:
    print("| mesh | CPU s a step | over plain JAX | |\n| --- | --- | --- | --- |")
    first = None
    for mesh, meaning in MEANING.items():
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            seconds = pool.submit(seconds_of, mesh, keys).result()
        first = first or seconds
        print(f"| {mesh} | {seconds:.3f} | {seconds / first:.2f} | {meaning} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
