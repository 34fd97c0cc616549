"""What emulated devices cost: CPU seconds of a step of equal work on one device and on meshes of a CPU.

`python -m tests.training.emulated [key=value ...]` takes the median of a few steps of train.py's model on every mesh,
and of the same model in Flax's own layers with plain JAX, each in a process of its own. CPU seconds of all threads
count, so another program on the machine changes them less than wall time.

The columns behind divide these seconds by kind of operation, in the proportion of the time that a trace of JAX's
profiler has for each, without the operations that they contain and without waits for other devices.
"""

import collections
import glob
import multiprocessing
import re
import statistics
import sys
import tempfile
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


KINDS = {  # the first pattern that a name matches
    "waits": "Rendezvous|Wait|wait|Await|ThunkExecutor|^while|^call|^conditional|Execute|callback|ThreadPool|^end: ",
    "products": "dot|ynn_fusion|convolution",
    "collectives": "all_gather|all-gather|reduce_scatter|reduce-scatter|all-reduce|psum|pmax|permute|all-to-all",
    "copies": "copy|transpose|slice|concatenate|update|pad|gather|scatter|broadcast",
    "element-wise": "",
}
SHOWN = tuple(KINDS)[1:]


def seconds_of(mesh: str, keys: list[str]) -> tuple[float, dict[str, float]]:
    """Median CPU seconds of a step, and their parts by kind of operation."""
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
    seconds = statistics.median(found)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(STEPS):
                wait(run())
        (trace,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        kinds = by_kind(jax.profiler.ProfileData.from_file(trace))
    return seconds, {kind: seconds * kinds[kind] / sum(kinds[each] for each in SHOWN) for kind in SHOWN}


def by_kind(trace) -> collections.Counter:
    """Nanoseconds by kind of all operations of XLA's threads, each without those that it contains."""
    found: collections.Counter = collections.Counter()
    for line in (line for plane in trace.planes for line in plane.lines if "XLA" in line.name):
        around: list[tuple[str, float]] = []  # (kind, end) of the events that contain the next one
        for event in sorted(line.events, key=lambda event: (event.start_ns, -event.duration_ns)):
            kind = next(kind for kind, pattern in KINDS.items() if re.search(pattern, event.name))
            while around and around[-1][1] <= event.start_ns:
                around.pop()
            if around:
                found[around[-1][0]] -= event.duration_ns
            found[kind] += event.duration_ns
            around.append((kind, event.start_ns + event.duration_ns))
    return found


def main(keys: list[str]) -> None:
    print(f"| mesh | CPU s a step | over plain JAX | {' | '.join(SHOWN)} | |\n{'| --- ' * (4 + len(SHOWN))}|")
    first = None
    for mesh, meaning in MEANING.items():
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            seconds, parts = pool.submit(seconds_of, mesh, keys).result()
        first = first or seconds
        cells = " | ".join(f"{parts[kind]:.3f}" for kind in SHOWN)
        print(f"| {mesh} | {seconds:.3f} | {seconds / first:.2f} | {cells} | {meaning} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
