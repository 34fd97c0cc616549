"""The step of bench=step on one device, with nothing special for the comparison."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mstrain.benchmarks.cases import Case
from mstrain.benchmarks.config import BenchmarkConfig
from mstrain.benchmarks.peers.task import Peer, Task
from mstrain.benchmarks.programs import step_work
from mstrain.benchmarks.work import Work
from mstrain.hardware import chip_for
from mstrain.mesh import MeshShape, make_mesh
from mstrain.models.parallel import ParallelConfig
from mstrain.models.plan import make_plan
from mstrain.program.dtype import dtype_on


def make(task: Task) -> Peer:
    """The peer; raises ValueError for a model that does not run."""
    device = jax.devices()[0]
    work = work_of(task, device)
    state, *rest = work.start()
    dtype = jnp.dtype(dtype_on(device.platform, task.dtype)).name
    return carried(work.program.compile, state, rest, dtype, device)


def work_of(task: Task, device) -> Work:
    """The step for one device, present or absent; raises ValueError as `make`."""
    mesh, dtype = make_mesh(MeshShape(), [device]), jnp.dtype(dtype_on(device.platform, task.dtype))
    plan = make_plan(ParallelConfig(), task.model, mesh, task.batch, task.seq, chip_for(device.device_kind))
    case = Case(task.model, MeshShape(), "meshslice", task.batch)
    return step_work(case, BenchmarkConfig(seq=task.seq, seed=task.seed), plan, dtype)


def random_tokens(task: Task):
    """int32 [batch, seq + 1]."""
    shape = (task.batch, task.seq + 1)
    return jax.random.randint(jax.random.key(task.seed), shape, 0, task.model.known_vocab_size, jnp.int32)


def carried(build: Callable[[], Callable], state: Any, rest: list, how: str, device) -> Peer:
    """The peer of a JAX step `step(state, *rest) -> (state, metrics)`; `build()` compiles it at the first call."""
    made = []

    def step():
        nonlocal state
        if not made:
            made.append(build())
        state, metrics = made[0](state, *rest)
        return metrics["loss"]

    def memory() -> int | None:
        return (device.memory_stats() or {}).get("peak_bytes_in_use")

    return Peer(device.device_kind, f"jax {jax.__version__}, {how}", step, jax.block_until_ready, memory)
