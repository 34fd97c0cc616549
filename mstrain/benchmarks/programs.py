"""The programs of a case: the training step, one layer, its products, or a layer without its products."""

import dataclasses

import jax
import jax.numpy as jnp

from mstrain.benchmarks.cases import Case, describe, describe_plans, products, step_of
from mstrain.benchmarks.config import BenchmarkConfig
from mstrain.benchmarks.nongemm import nongemm_work
from mstrain.benchmarks.work import Work
from mstrain.models.flops import training_flops_per_token
from mstrain.models.plan import ModelPlan
from mstrain.models.products import projections
from mstrain.program.optimizer import schedule_of
from mstrain.program.parts import layer_program, product_program
from mstrain.program.step import init_state


def make_works(case: Case, config: BenchmarkConfig, plan: ModelPlan, dtype: jnp.dtype) -> list[Work]:
    """The programs of one case, in the order of the table."""
    if config.bench == "step":
        return [step_work(case, config, plan, dtype)]
    if config.bench == "layer":
        return [layer_work(case, config.seq, plan, dtype)]
    if config.bench == "nongemm":
        return [nongemm_work(case, config.seq, plan, dtype)]
    return gemm_works(case, config.seq, plan, dtype)


def step_work(case: Case, config: BenchmarkConfig, plan: ModelPlan, dtype: jnp.dtype) -> Work:
    """The training step of `train.py`; the state that it returns is the argument of the next execution."""
    step = step_of(case, config, plan.mesh, dtype)
    module, optimizer = step.module(plan), step.make_optimizer()
    program = step.program(module, optimizer)
    _, batch, schedule = program.arguments
    tokens = batch.tokens

    def start():
        ids = jax.random.randint(jax.random.key(config.seed), tokens.shape, 0, case.model.known_vocab_size, jnp.int32)
        batches = batch._replace(tokens=jax.device_put(ids, tokens.sharding))
        rates = jax.device_put(schedule_of(step.optimizer.for_width(case.model.width), steps=1000), schedule.sharding)
        return init_state(module, optimizer, config.seed), batches, rates

    count = case.batch * config.seq
    return Work(
        "step", describe(plan.groups[0][0]), program, start, count,
        count * training_flops_per_token(case.model, config.seq), carries=True,
    )  # fmt: skip


def layer_work(case: Case, seq: int, plan: ModelPlan, dtype: jnp.dtype) -> Work:
    """One block, forward and backward."""
    block, count = plan.groups[0][0], plan.padded_sequences(case.microbatch) * seq
    program = layer_program(case.model, block, count, seq, dtype)
    one = dataclasses.replace(case.model, layers=1, vocab_size=1, window=None)
    head = 6 * one.width  # FLOPs of the output projection to a vocabulary of one token
    flops = count * (training_flops_per_token(one, seq) - head)
    return Work("layer", describe(block), program, program.random_arguments, count, flops)


def gemm_works(case: Case, seq: int, plan: ModelPlan, dtype: jnp.dtype) -> list[Work]:
    """The products of a block, each forward and backward."""
    block, count = plan.groups[0][0], plan.padded_sequences(case.microbatch) * seq
    plans, works = products(block), []
    for p in projections(case.model, sizes=block.sizes):
        program = product_program(plans[p.name], count, p.in_dim, p.out_dim, dtype, backward=True)
        flops = 6.0 * count * p.in_dim * p.out_dim
        works.append(Work(p.name, describe_plans(plans[p.name]), program, program.random_arguments, count, flops))
    return works
