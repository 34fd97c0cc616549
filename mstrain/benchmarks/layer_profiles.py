"""Measures the Metis profile of a model on the devices present, for one tensor degree and batch.

The time and memory of a layer are the difference between models of three layers and one layer, over two. The time of
the output layer is that of the model of one layer without its layer and the embedding.
"""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mstrain.mesh import MeshShape, make_mesh
from mstrain.models.config import ModelConfig
from mstrain.models.parallel import ParallelConfig
from mstrain.models.parameters import init_parameters
from mstrain.models.plan import make_plan
from mstrain.models.transformer import Transformer
from mstrain.planner.memory import WEIGHT_BYTES, parameter_counts
from mstrain.program.memory import memory_of
from mstrain.program.optimizer import OptimizerConfig, make_optimizer, schedule_of
from mstrain.program.program import Program

MEGABYTE = 1e6
SHALLOW, DEEP = 1, 3  # layers of the two models
LEAST_MS = 1e-4  # lower bound of times in a profile; differences of measured times can be zero


@dataclass(frozen=True)
class Sizes:
    """Sizes of a measurement: `batch` sequences of `seq` tokens on `tensor` devices."""

    seq: int
    batch: int
    tensor: int
    algorithm: str
    dtype: str
    repeats: int


@dataclass(frozen=True)
class Measured:
    """Milliseconds and MB of one model. `gradient_ms` is forward and backward; memory is of the compiled program."""

    gradient_ms: float
    embedding_ms: float
    update_ms: float
    feed_ms: float
    memory_mb: float


def fastest_ms(function: Callable[[], object], repeats: int) -> float:
    """The shortest of `repeats` runs after one warmup run."""
    jax.block_until_ready(function())
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - begin)
    return 1e3 * min(times)


def measure_model(model: ModelConfig, sizes: Sizes) -> Measured:
    """Measures gradient, embedding gradient, update and feed; raises ValueError if the plan is illegal."""
    mesh = make_mesh(MeshShape(1, 1, sizes.tensor))
    plan = make_plan(ParallelConfig(sizes.algorithm), model, mesh, sizes.batch, sizes.seq)
    dtype = {"bf16": jnp.bfloat16, "f32": jnp.float32}[sizes.dtype]
    module = Transformer(model, plan, sizes.seq, dtype)
    params = init_parameters(module, 0)
    random = np.random.default_rng(0)
    tokens = random.integers(0, model.known_vocab_size, sizes.batch * sizes.seq).astype(np.int32)

    def apply(params, *inputs, method) -> Any:
        return module.apply({"params": params}, *inputs, method=method)

    def loss(params, tokens):
        return jnp.mean(apply(params, tokens, tokens, method="loss"))

    def embedded(params, tokens):
        return jnp.sum(apply(params, tokens, method=lambda m, t: m.embedding(t)).astype(jnp.float32))

    gradient = Program("gradient", jax.grad(loss), (params, tokens)).compile()
    embedding = Program("gradient of the embedding", jax.grad(embedded), (params, tokens)).compile()
    options = OptimizerConfig(learning_rate=1e-3)
    optimizer = make_optimizer(options)

    def updated(grads, moments, params):
        return optimizer.update(grads, moments, params, schedule=schedule_of(options, steps=10))

    moments, grads = jax.jit(optimizer.init)(params), gradient(params, tokens)
    update = Program("update", updated, (grads, moments, params)).compile()
    memory = memory_of(gradient, mesh)
    return Measured(
        fastest_ms(lambda: gradient(params, tokens), sizes.repeats),
        fastest_ms(lambda: embedding(params, tokens), sizes.repeats),
        fastest_ms(lambda: update(grads, moments, params), sizes.repeats),
        fastest_ms(lambda: jax.device_put(random.permutation(tokens)), sizes.repeats),
        (memory.arguments + memory.outputs + memory.temporaries) / MEGABYTE,
    )


def profile_document(model: ModelConfig, sizes: Sizes) -> dict:
    """The profile file of `model` with equal layers: embedding, layers, output layer."""
    shallow, deep = (measure_model(dataclasses.replace(model, layers=layers), sizes) for layers in (SHALLOW, DEEP))

    def per_layer(name: str) -> float:
        return max(0.0, getattr(deep, name) - getattr(shallow, name)) / (DEEP - SHALLOW)

    layer, update = max(LEAST_MS, per_layer("gradient_ms")), per_layer("update_ms")
    embedding = max(LEAST_MS, min(shallow.embedding_ms, shallow.gradient_ms - layer))
    output = max(LEAST_MS, shallow.gradient_ms - layer - embedding)
    count, first, last = parameter_counts(model)
    parameters = [first, *[count] * model.layers, last]
    in_layer = per_layer("memory_mb")
    rest = max(0.0, shallow.memory_mb - in_layer)
    table = min(rest, 2 * WEIGHT_BYTES * first / sizes.tensor / MEGABYTE)  # with its gradient
    memory = [table, *[in_layer] * model.layers, rest - table]
    times = [embedding, *[layer] * model.layers, output]
    optimizer = shallow.update_ms + update * (model.layers - SHALLOW)
    return {
        "model": {
            "model_name": model.name,
            "num_layers": model.layers + 2,
            "parameters": {
                "total_parameters_bytes": WEIGHT_BYTES * sum(parameters),
                "parameters_per_layer_bytes": [WEIGHT_BYTES * number for number in parameters],
            },
        },
        "execution_time": {
            "total_time_ms": sum(times) + shallow.feed_ms + optimizer,
            "forward_backward_time_ms": sum(times),
            "batch_generator_time_ms": shallow.feed_ms,
            "layernorm_grads_all_reduce_time_ms": 0.0,
            "embedding_grads_all_reduce_time_ms": 0.0,
            "optimizer_time_ms": optimizer,
            "layer_compute_total_ms": times,
        },
        "execution_memory": {"total_memory": sum(memory), "layer_memory_total_mb": memory},
    }
