"""The programs that are timed or compiled: the training step, one layer, its products, the rest of a layer.

Each returns everything it computes, weight gradients too, so that no part of it is dead code.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mstrain.benchmarks.cases import Case, describe, describe_plans, products
from mstrain.benchmarks.config import BenchmarkConfig
from mstrain.benchmarks.nongemm import nongemm_work
from mstrain.benchmarks.work import Work, abstract, boxed_arguments, random_arguments, with_pullback
from mstrain.gemm import linear
from mstrain.models.auto import projections
from mstrain.models.flops import training_flops_per_token
from mstrain.models.plan import ModelPlan
from mstrain.models.transformer import Block, Transformer
from mstrain.program.optimizer import OptimizerConfig, make_optimizer
from mstrain.program.step import abstract_state, init_state, make_step
from mstrain.training.feed import Feed


def make_works(case: Case, config: BenchmarkConfig, plan: ModelPlan, dtype: jnp.dtype) -> list[Work]:
    """The programs of one case, in the order of the table."""
    if config.bench == "step":
        return [step_work(case, config, plan, dtype)]
    if config.bench == "layer":
        return [layer_work(case, config.seq, plan, dtype)]
    if config.bench == "nongemm":
        return [nongemm_work(case, config.seq, plan, dtype)]
    return gemm_works(case, config.seq, plan, dtype)


@dataclasses.dataclass(frozen=True)
class _Batches:
    """What a `Feed` asks of batches, without a corpus."""

    batch_size: int
    seq: int


def step_work(case: Case, config: BenchmarkConfig, plan: ModelPlan, dtype: jnp.dtype) -> Work:
    """The training step of `train.py`: its state is replaced by the one it returns."""
    module = Transformer(case.model, plan, config.seq, dtype, config.remat)
    optimizer = make_optimizer(OptimizerConfig().for_width(case.model.width), steps=1000)
    tokens = Feed(_Batches(case.batch, config.seq), plan.mesh, case.accumulate).abstract()
    vocab_size = case.model.vocab_size

    def start():
        ids = jax.random.randint(jax.random.key(config.seed), tokens.shape, 0, vocab_size, jnp.int32)
        return init_state(module, optimizer, config.seed), jax.device_put(ids, tokens.sharding)

    count = case.batch * config.seq
    arguments = (abstract_state(module, optimizer), tokens)
    return Work(
        "step", describe(plan.groups[0][0]), make_step(module, optimizer), arguments, start, count,
        count * training_flops_per_token(case.model, config.seq), carries=True,
    )  # fmt: skip


def layer_work(case: Case, seq: int, plan: ModelPlan, dtype: jnp.dtype) -> Work:
    """One block, forward and backward: (y, parameter gradients, dx) from (parameters, x, dy)."""
    block_plan = plan.groups[0][0]
    block = Block(case.model, block_plan, seq)
    count = case.microbatch * seq
    x = abstract((count, case.model.width), dtype, plan.mesh, block_plan.attention.residual.spec)
    params = boxed_arguments(block, plan.mesh, x, seq)

    def forward(params, x):
        return block.apply({"params": params}, x, seq)[0]

    one = dataclasses.replace(case.model, layers=1, vocab_size=1, window=None)
    head = 6 * one.width  # of the vocabulary of one token
    arguments = (params, x, x)
    return Work(
        "layer", describe(block_plan), with_pullback(forward), arguments,
        lambda: random_arguments(arguments), count,
        count * (training_flops_per_token(one, seq) - head),
    )  # fmt: skip


def gemm_works(case: Case, seq: int, plan: ModelPlan, dtype: jnp.dtype) -> list[Work]:
    """The four products of a block, each forward and backward: (y, dx, dw) from (x, w, dy)."""
    plans, count = products(plan.groups[0][0]), case.microbatch * seq
    return [_gemm_work(p, plans[p.name], count, dtype) for p in projections(case.model)]


def _gemm_work(projection, plan, count: int, dtype) -> Work:
    mesh, into, out = plan.grid.mesh, projection.in_dim, projection.out_dim
    weight = (out, into) if plan.dataflow == "ls" else (into, out)
    arguments = (
        abstract((count, into), dtype, mesh, plan.input_layout.spec),
        jax.ShapeDtypeStruct(weight, dtype, sharding=NamedSharding(mesh, P(*plan.grid.weight_spec))),
        abstract((count, out), dtype, mesh, plan.output_layout.spec),
    )
    function: Callable = with_pullback(lambda x, w: linear(x, w, plan))
    return Work(
        projection.name, describe_plans(plan), function, arguments,
        lambda: random_arguments(arguments), count, 6.0 * count * into * out,
    )  # fmt: skip
