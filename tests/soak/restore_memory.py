"""Saves a checkpoint of two gigabytes on one mesh, restores it on another, and reports memory and speed.

    python -m tests.soak.restore_memory --folder /tmp/restore

Emulated devices live in the host's memory, so peak resident memory over what the process had before, less the
state itself, is what reading and resharding need beside it. Freed memory is returned at once
(MALLOC_MMAP_THRESHOLD_), or it would count as used.
"""

import argparse
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from etils import epath

from mstrain.checkpoints import manifest
from mstrain.commands.train import load_config
from mstrain.mesh import emulate_devices

WORDS = ["model=gpt2", "model.layers=18", "data=synthetic", "seq=64", "batch=8", "parallel=collective"]
GB = 10**9


def save(folder: Path) -> None:
    """A state before its first step; moments of zero would compress, so they are drawn, too."""
    import jax

    run, checkpoints = _run("mesh=2x4"), _checkpoints(folder)
    from mstrain.program.step import init_state

    state = init_state(run.module, run.optimizer, 0)
    params = state["params"]
    state["optimizer"] = jax.tree.map(
        lambda x: jax.random.normal(jax.random.key(x.size), x.shape).astype(x.dtype) if x.ndim else x,
        state["optimizer"],
    )
    start = time.perf_counter()
    checkpoints.save(1, {**state, "params": params}, run.module, run.optimizer, {})
    checkpoints.wait()
    seconds = time.perf_counter() - start
    (host,) = manifest.read(epath.Path(folder / "checkpoints" / "1"))["hosts"]
    speed = host["bytes"] / host["write_seconds"] / GB
    print(f"saved in {seconds:.1f} s, {host['write_seconds']:.1f} s of which it wrote ({speed:.2f} GB/s)")


def restore(folder: Path) -> None:
    import jax

    run, checkpoints = _run("mesh=4x2"), _checkpoints(folder)
    start = time.perf_counter()
    assert manifest.problems(checkpoints.directory / "1") == []
    checked = time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    state = checkpoints.restore(1, run.module, run.optimizer)
    jax.block_until_ready(state)
    seconds = time.perf_counter() - checked
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    held = sum(shard.data.nbytes for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards)
    over = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before - held
    print(
        f"state {size / GB:.2f} GB ({held / GB:.2f} GB on the devices), restored on another mesh in "
        f"{seconds:.1f} s ({size / seconds / GB:.2f} GB/s), checksums in {checked - start:.1f} s "
        f"({size / (checked - start) / GB:.2f} GB/s), beside the state {over / GB:.2f} GB"
    )


def _run(mesh: str):
    """What a checkpoint needs of a run; nothing is compiled."""
    import jax.numpy as jnp

    from mstrain import mesh as meshes
    from mstrain.models.plan import make_plan
    from mstrain.models.transformer import Transformer
    from mstrain.program.optimizer import make_optimizer

    class Run:
        config = load_config([*WORDS, mesh])

    model = Run.config.model
    plan = make_plan(Run.config.parallel, model, meshes.make_mesh(meshes.parse_mesh(mesh[5:])), 8, 64, None)
    Run.module = Transformer(model, plan, 64, jnp.float32, "none")
    Run.optimizer = make_optimizer(Run.config.optimizer)
    return Run


def _checkpoints(folder: Path):
    from mstrain.checkpoints.checkpoints import Checkpoints

    return Checkpoints(folder / "checkpoints", 3)


def disk(folder: Path) -> None:
    """Speed of reading the same files and nothing else; the page cache is as warm as for the restore."""
    start, size = time.perf_counter(), 0
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb", buffering=0) as file:
                while block := file.read(2**24):
                    size += len(block)
    print(f"plain reading of {size / GB:.2f} GB: {size / (time.perf_counter() - start) / GB:.2f} GB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("/tmp/mstrain-restore"))
    parser.add_argument("--part", choices=["save", "restore"])
    options = parser.parse_args()
    if options.part:
        emulate_devices(8)
        {"save": save, "restore": restore}[options.part](options.folder)
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "MALLOC_MMAP_THRESHOLD_": "1000000"}
    for part in ("save", "restore"):
        words = ["-m", "tests.soak.restore_memory", "--part", part, "--folder", str(options.folder)]
        subprocess.run([sys.executable, *words], check=True, env=environment)
    disk(options.folder)


if __name__ == "__main__":
    main()
