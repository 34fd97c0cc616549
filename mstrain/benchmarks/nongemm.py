"""A layer without its products: norms, attention, activation and residual sums, with the layouts of the layer."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn

from mstrain.benchmarks.cases import Case
from mstrain.benchmarks.work import Work
from mstrain.layers.attention import Attention
from mstrain.layers.mlp import Mlp, activate
from mstrain.models.flops import forward_flops_per_token
from mstrain.models.plan import ModelPlan
from mstrain.models.transformer import Block, move
from mstrain.program.program import Program, abstract, abstract_layer_parameters, with_pullback


class Scoring(Attention):
    """Attention from fused queries, keys and values, without its projections."""

    @nn.compact
    def __call__(self, qkv, seq, window):
        return self._attend(qkv, seq, window, None, None)[0]


class Activation(Mlp):
    """The activation between the projections of an MLP."""

    def __call__(self, h):
        return activate(h, self.plans, self.activation, self.gated)


class NonGemm(Block):
    """Computes norms, attention, activation and residual sums of a block from x_TxD, qkv and hidden features h."""

    @nn.compact
    def __call__(self, x_TxD, qkv, h_TxF, seq):
        m, plan = self.model, self.plan
        scores = Scoring(**_fields(self._attention()), name="scoring")(qkv, seq, seq)
        mlp = self._mlp(None)
        assert isinstance(mlp, Mlp), "experts are refused before"
        hidden = Activation(**_fields(mlp), name="activation")(h_TxF)
        residual = plan.attention.residual
        normed = self._norm("attention_norm", residual)(x_TxD)
        x_TxD = x_TxD + normed
        if not m.parallel_block:
            x_TxD = move(x_TxD, plan.mlp.residual, plan)
            x_TxD = x_TxD + self._norm("mlp_norm", plan.mlp.residual)(x_TxD)
        if m.post_norm:
            x_TxD = self._norm("mlp_post_norm", residual)(self._norm("attention_post_norm", residual)(x_TxD))
        return x_TxD, scores, hidden


def _fields(module: nn.Module) -> dict:
    names = {field.name for field in dataclasses.fields(module)} - {"parent", "name"}
    return {name: getattr(module, name) for name in names}


def nongemm_work(case: Case, seq: int, plan: ModelPlan, dtype: jnp.dtype) -> Work:
    """The non-GeMM part of one block, forward and backward. Its FLOPs are those of the attention scores."""
    model, block = case.model, plan.groups[0][0]
    count = case.microbatch * seq
    qkv = (model.heads + 2 * model.num_kv_heads) * model.head_dim
    hidden = model.mlp_dim * (2 if model.gated else 1)
    inputs = tuple(
        abstract((count, width), dtype, plan.mesh, layout.spec)
        for width, layout in (
            (model.width, block.attention.residual), (qkv, block.attention.inside), (hidden, block.mlp.inside)
        )
    )  # fmt: skip
    module = NonGemm(model, block, seq)
    params = abstract_layer_parameters(module, plan.mesh, *inputs, seq)

    def forward(params, x, qkv, h):
        return module.apply({"params": params}, x, qkv, h, seq)

    outputs = jax.eval_shape(forward, params, *inputs)
    layouts = (block.mlp.residual, block.attention.inside, block.mlp.inside)
    cotangents = tuple(
        abstract(y.shape, y.dtype, plan.mesh, layout.spec) for y, layout in zip(outputs, layouts, strict=True)
    )
    program = Program(f"non-GeMM part of {model.name}", with_pullback(forward), (params, *inputs, cotangents))
    one = dataclasses.replace(model, layers=1, vocab_size=1, window=None)
    scores = forward_flops_per_token(one, seq) - forward_flops_per_token(one, seq, "causal")  # half of them
    return Work("nongemm", "", program, program.random_arguments, count, 6 * count * scores)
