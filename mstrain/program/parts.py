"""Programs of parts of a step, which benchmarks time and predict: one layer, one product."""

import jax.numpy as jnp

from mstrain.gemm import Plan, linear
from mstrain.models.config import ModelConfig
from mstrain.models.plan import BlockPlan
from mstrain.models.transformer import Block
from mstrain.program.program import Program, abstract, abstract_layer_parameters, with_pullback


def layer_program(model: ModelConfig, plan: BlockPlan, tokens: int, seq: int, dtype: jnp.dtype) -> Program:
    """One block with its gradients: (y, parameter gradients, dx) from (parameters, x, dy).

    `tokens` of the whole job, in sequences of `seq`. Parameters are float32, as in training; x, y and dy are `dtype`.
    """
    block = Block(model, plan, seq)
    x_TxD = abstract((tokens, plan.sizes.width.stored), dtype, plan.mesh, plan.attention.residual.spec)
    params = abstract_layer_parameters(block, plan.mesh, x_TxD, seq)

    def forward(params, x_TxD):
        return block.apply({"params": params}, x_TxD, seq)[0]

    return Program(f"layer of {model.name}", with_pullback(forward), (params, x_TxD, x_TxD), plan.algorithm)


def product_program(
    plan: Plan, tokens: int, in_dim: int, out_dim: int, dtype: jnp.dtype, backward: bool = False
) -> Program:
    """y_TxO = x_TxI @ w under `plan`, or with `backward` (y, dx, dw) from (x, w, dy); all of them `dtype`."""
    mesh = plan.grid.mesh
    x_TxI = abstract((tokens, in_dim), dtype, mesh, plan.input_layout.spec)
    weight = (out_dim, in_dim) if plan.dataflow == "ls" else (in_dim, out_dim)
    w = abstract(weight, dtype, mesh, plan.grid.weight_spec)
    dy_TxO = abstract((tokens, out_dim), dtype, mesh, plan.output_layout.spec)

    def forward(x_TxI, w):
        return linear(x_TxI, w, plan)

    name = f"{plan.algorithm} {plan.dataflow} {tokens}x{in_dim}x{out_dim} S={plan.slices}"
    if backward:
        return Program(name, with_pullback(forward), (x_TxI, w, dy_TxO), plan.program)
    return Program(name, forward, (x_TxI, w), plan.program)
