"""The step of train.py on one device, with nothing special for the comparison."""

import jax
import jax.numpy as jnp

from mstrain.benchmarks.peers.task import CLIP, LEARNING_RATE, WEIGHT_DECAY, Peer, Task
from mstrain.hardware import chip_for
from mstrain.mesh import MeshShape, make_mesh
from mstrain.models.parallel import ParallelConfig
from mstrain.models.plan import make_plan
from mstrain.models.transformer import Transformer
from mstrain.program.dtype import dtype_on
from mstrain.program.optimizer import OptimizerConfig, make_optimizer
from mstrain.program.step import init_state, step_program

OPTIMIZER = OptimizerConfig(
    learning_rate=LEARNING_RATE, warmup=0, schedule="constant", weight_decay=WEIGHT_DECAY, clip=CLIP
)


def make(task: Task) -> Peer:
    """The peer; raises ValueError for a model that does not run."""
    device = jax.devices()[0]
    mesh = make_mesh(MeshShape(row=1, col=1), [device])
    dtype = dtype_on(device.platform, task.dtype)
    plan = make_plan(ParallelConfig(), task.model, mesh, task.batch, task.seq, chip_for(device.device_kind))
    module = Transformer(task.model, plan, task.seq, dtype)
    optimizer = make_optimizer(OPTIMIZER, steps=1000)
    program = step_program(module, optimizer, task.batch, 1)
    tokens = program.arguments[1].tokens
    ids = random_tokens(task).reshape(tokens.shape)
    batch = program.arguments[1]._replace(tokens=jax.device_put(ids, tokens.sharding))
    return carried(program.compile, init_state(module, optimizer, task.seed), batch, jnp.dtype(dtype).name, device)


def random_tokens(task: Task):
    """int32 [batch, seq + 1], the same of every peer."""
    shape = (task.batch, task.seq + 1)
    return jax.random.randint(jax.random.key(task.seed), shape, 0, task.model.known_vocab_size, jnp.int32)


def carried(compile, state, batch, how: str, device) -> Peer:
    """The peer of a JAX step `step(state, batch) -> (state, metrics)`; `compile()` makes it at the first call."""
    made = []

    def step():
        nonlocal state
        if not made:
            made.append(compile())
        state, metrics = made[0](state, batch)
        return metrics["loss"]

    def memory() -> int | None:
        return (device.memory_stats() or {}).get("peak_bytes_in_use")

    return Peer(device.device_kind, f"jax {jax.__version__}, {how}", step, jax.block_until_ready, memory)
