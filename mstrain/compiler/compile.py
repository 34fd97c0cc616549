"""Compile a product, a transformer layer or the training step for a target. Nothing is allocated or run.

Arguments are `jax.ShapeDtypeStruct`s with shardings on the target's mesh.
"""

import dataclasses
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mstrain.compiler.topology import Target, quiet
from mstrain.gemm import Flows, Grid, LoweringOptions, Plan, linear
from mstrain.layers.parameter import is_stored
from mstrain.models.config import ModelConfig
from mstrain.models.parameters import abstract_parameters
from mstrain.models.plan import ParallelConfig, make_plan
from mstrain.models.transformer import Block, Transformer
from mstrain.program.memory import GIB, Memory, read_memory
from mstrain.program.step import make_step, state_shardings


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program: scheduled HLO text, memory on one device, and the seconds it took to compile."""

    name: str
    target: Target
    text: str
    memory: Memory
    seconds: float

    def check_fits(self) -> None:
        """Raises DoesNotFit when a device has too little memory: XLA compiles some that nothing holds."""
        if not self.memory.fits:
            raise DoesNotFit(_does_not_fit(self.name, self.target, self.memory.peak), self.memory.peak)


class DoesNotFit(ValueError):
    """The program needs more memory than a device of the target has: `needed` bytes, None where unknown."""

    def __init__(self, message: str, needed: float | None = None):
        super().__init__(message)
        self.needed = needed


def compile_function(
    name: str, function: Callable, arguments: tuple, target: Target,
    options: Mapping[str, bool | int | str] | None = None, dump: str | Path | None = None,
) -> Program:
    """Compiles `function(*arguments)` for `target`.

    Args:
      function: a function, or one that is already jitted.
      options: XLA options instead of the target's own.
      dump: folder in which the scheduled program is left as NAME.hlo.

    Raises:
      DoesNotFit: with the bytes the compiler asked for.
    """
    jitted = function if hasattr(function, "lower") else jax.jit(function)
    options = target.compiler_options if options is None else dict(options)
    begin = time.perf_counter()
    try:
        with quiet():
            compiled = jitted.lower(*arguments).compile(compiler_options=options)
            text = compiled.as_text()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            needed = needed_bytes(str(error))
            raise DoesNotFit(_does_not_fit(name, target, needed), needed) from None
        raise
    memory = read_memory(compiled, target.tpu_slice.chip.hbm_bytes)
    program = Program(name, target, text, memory, time.perf_counter() - begin)
    if dump is not None:
        Path(dump).mkdir(parents=True, exist_ok=True)
        (Path(dump) / (re.sub(r"[^\w.-]+", "_", name) + ".hlo")).write_text(text)
    return program


# What XLA:TPU says; the amount includes arguments and results, whatever it calls them.
_NEEDED = (
    r"total memory required for HLO temporaries \(([\d.]+)([KMGT])\)",  # before anything has a place
    r"Used ([\d.]+)([KMGT]) of \S+ hbm",  # when places are given out
)


def needed_bytes(error: str) -> float | None:
    """The bytes that a program would need, from the compiler's message that it does not fit."""
    for pattern in _NEEDED:
        if match := re.search(pattern, error):
            return float(match[1]) * 1024.0 ** (1 + "KMGT".index(match[2]))
    return None


def _does_not_fit(name: str, target: Target, needed: float | None) -> str:
    hbm = target.tpu_slice.chip.hbm_bytes
    have = f"{hbm / GIB:.1f} GiB" if hbm else "its memory"
    used = f"{needed / GIB:.1f} GiB of {have}" if needed else f"more than {have}"
    return (
        f"{name} does not fit on {target.tpu_slice.name}: a device would need {used}. Type remat=full, a smaller "
        "batch= or more accumulate=, or take a larger slice."
    )


def compile_gemm(
    plan: Plan, target: Target, tokens: int, in_dim: int, out_dim: int, backward: bool = False,
    dtype: jnp.dtype = jnp.bfloat16, **keywords,
) -> Program:
    """Compiles y_TxO = x_TxI @ w under `plan`, or with `backward` also (y, dx, dw) from dy.

    x, w and dy are `dtype`. Further keywords are those of `compile_function`.
    """
    def shaped(shape, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(target.mesh, spec))

    weight = (out_dim, in_dim) if plan.dataflow == "ls" else (in_dim, out_dim)
    x = shaped((tokens, in_dim), plan.input_layout.spec)
    w = shaped(weight, plan.grid.weight_spec)
    dy = shaped((tokens, out_dim), plan.output_layout.spec)

    def forward(x, w):
        return linear(x, w, plan)

    def forward_and_backward(x, w, dy):
        y, pullback = jax.vjp(forward, x, w)
        return y, *pullback(dy)

    name = f"{plan.algorithm} {plan.dataflow} {tokens}x{in_dim}x{out_dim} S={plan.slices}"
    function, arguments = (forward_and_backward, (x, w, dy)) if backward else (forward, (x, w))
    return compile_function(name, function, arguments, target, **keywords)


def compile_flow(
    algorithm: str, flow: str, slices: int, target: Target, tokens: int, in_dim: int, out_dim: int, **keywords
) -> Program:
    """Compiles one of the three products of a projection, bf16.

    They are os: Y = X W, ls: dX = dY W^T, rs: dW = X^T dY; X is tokens x `in_dim`, Y tokens x `out_dim`.
    """
    grid = Grid(target.mesh, ("row",), ("col",))
    flows = Flows(Plan(algorithm, flow, grid, slices, LoweringOptions(**target.tpu_slice.chip.lowering)))
    spec = grid.weight_spec
    on_mesh = flows.on_mesh(getattr(flows, flow), (spec, spec), spec)
    x, w, y = (tokens, in_dim), (in_dim, out_dim), (tokens, out_dim)
    sharding = grid.sharding(spec)
    operands = {"os": (x, w), "ls": (y, w), "rs": (x, y)}[flow]
    arguments = tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding) for shape in operands)
    return compile_function(f"{algorithm} {flow} S={slices}", on_mesh, arguments, target, **keywords)


def compile_layer(
    model: ModelConfig, parallel: ParallelConfig, target: Target, batch: int, seq: int, **keywords
) -> Program:
    """Compiles one transformer layer in bf16 with its gradients: (y, gradients, dx) from (parameters, x, dy).

    `batch` counts sequences of `seq` tokens, whole job. Parameters are float32, as in training.
    """
    plan = make_plan(parallel, model, target.mesh, batch, seq).groups[0][0]
    block = Block(model, plan, seq)
    layout = NamedSharding(target.mesh, plan.attention.residual.spec)
    x = jax.ShapeDtypeStruct((batch * seq, model.width), jnp.bfloat16, sharding=layout)
    boxed = jax.eval_shape(lambda x: block.init(jax.random.key(0), x, seq), x)["params"]
    params = jax.tree.map(
        lambda box: _shaped(box.value, NamedSharding(target.mesh, box.spec)), boxed, is_leaf=is_stored
    )

    def forward(params, x):
        return block.apply({"params": params}, x, seq)[0]

    def forward_and_backward(params, x, dy):
        y, pullback = jax.vjp(forward, params, x)
        return y, *pullback(dy)

    name = f"layer of {model.name}"
    return compile_function(name, forward_and_backward, (params, x, x), target, **keywords)


def compile_step(
    module: Transformer, optimizer: optax.GradientTransformation, target: Target, batch: int,
    accumulate: int = 1, **keywords,
) -> Program:
    """Compiles the training step (`mstrain.program.step`): `accumulate` microbatches of `batch` sequences.

    `module.plan` must lie on `target.mesh`.
    """
    params = jax.tree.map(lambda box: box.value, abstract_parameters(module), is_leaf=is_stored)
    shapes = {
        "step": jax.ShapeDtypeStruct((), jnp.int32),
        "params": params,
        "optimizer": jax.eval_shape(optimizer.init, params),
    }
    state = jax.tree.map(_shaped, shapes, state_shardings(module, optimizer))
    size = target.mesh.shape
    axes = ("data", "row") if batch % (size["data"] * size["row"]) == 0 else "data"
    tokens = jax.ShapeDtypeStruct(
        (accumulate, batch, module.seq + 1), jnp.int32, sharding=NamedSharding(target.mesh, P(None, axes))
    )
    step = make_step(module, optimizer)
    return compile_function(f"step of {module.model.name}", step, (state, tokens), target, **keywords)


def _shaped(x, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
