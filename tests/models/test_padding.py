"""Any model on any mesh: loss and gradients of one device where heads, features and sequences are shared or padded."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mstrain.data import Batch
from mstrain.gemm.padding import Heads
from mstrain.mesh import make_mesh, parse_mesh
from mstrain.models import parameters
from mstrain.models.config import ModelConfig
from mstrain.models.description import describe_plan
from mstrain.models.plan import ParallelConfig, make_plan
from mstrain.models.transformer import Transformer
from mstrain.program.step import mean_loss
from tests.quick import QUICK

SEQ, SEQUENCES = 8, 11
LLAMA = ModelConfig(
    layers=1, width=20, heads=8, num_kv_heads=2, head_dim=6, mlp_dim=44, vocab_size=31, norm="rmsnorm", norm_bias=False,
    position="rotary", activation="silu", gated=True, bias="qkv", qk_norm=True, tied=False,
)  # fmt: skip
GPT = ModelConfig(layers=1, width=20, heads=12, head_dim=4, mlp_dim=44, vocab_size=31, position="alibi")
CASES = {
    "shared keys": (LLAMA, "2x4", ParallelConfig("meshslice", slices="1")),
    "shared keys on one row": (LLAMA, "1x8", ParallelConfig("megatron")),
    "keys of every column": (LLAMA, "1x3", ParallelConfig("collective", dataflow="ls")),
    "GPT-2's heads on 8 columns": (GPT, "1x8", ParallelConfig("wang", dataflow="rs")),
    "features on 3x2": (GPT, "3x2", ParallelConfig("summa", dataflow="os")),
    "features on 2x3": (LLAMA, "2x3", ParallelConfig("collective", dataflow="rs")),
    "two halves": (GPT, "3x2", ParallelConfig("gspmd", attention="fsdp")),
}


def make(model, mesh, parallel):
    mesh = make_mesh(parse_mesh(mesh))
    return Transformer(model, make_plan(parallel, model, mesh, SEQUENCES, SEQ), SEQ)


@functools.cache
def initial(model):
    params = jax.jit(lambda: parameters.init_canonical(make(model, "1x1", ParallelConfig("gspmd")), 0))()
    rng = np.random.default_rng(0)  # biases and scales too
    return jax.tree.map(lambda x: np.asarray(x) + rng.normal(0, 0.2, x.shape).astype(np.float32), params)


@functools.cache
def loss_and_gradients(model, mesh, parallel):
    """Canonical gradients, and the largest number in the padding of the stored ones."""
    module = make(model, mesh, parallel)
    batch = Batch(np.random.default_rng(1).integers(0, model.vocab_size, (SEQUENCES, SEQ + 1)).astype(np.int32))

    def run(canonical):
        stored = parameters.from_canonical(module, canonical)
        loss, grads = jax.value_and_grad(lambda p: mean_loss(module, p, batch))(stored)
        canonical_grads = parameters.to_canonical(module, grads)
        back = parameters.from_canonical(module, canonical_grads)
        padding = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)), grads, back)
        return loss, canonical_grads, padding

    replicated = jax.NamedSharding(module.plan.mesh, jax.P())
    program = jax.jit(run, in_shardings=replicated, out_shardings=replicated)
    return jax.device_get(program.lower(initial(model)).compile(QUICK)(initial(model)))


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_one_device(case):
    model, mesh, parallel = CASES[case]
    want_loss, want, _ = loss_and_gradients(model, "1x1", ParallelConfig("gspmd"))
    loss, grads, padding = loss_and_gradients(model, mesh, parallel)
    assert abs(loss / want_loss - 1) < 1e-5
    errors = jax.tree.map(lambda a, b: np.max(np.abs(a - b)) / np.max(np.abs(b)), grads, want)
    worst = max(jax.tree_util.tree_leaves_with_path(errors), key=lambda pair: pair[1])
    assert worst[1] < 2e-5, (jax.tree_util.keystr(worst[0]), worst[1])
    assert not any(jax.tree.leaves(padding)), padding  # so that moments, weights and norms of gradients have none


@pytest.mark.parametrize("columns", [16, 32])
@pytest.mark.parametrize("queries, keys", [(64, 8), (32, 8), (40, 8), (16, 8)])
def test_eight_key_value_heads_on_more_columns(queries, keys, columns):
    """Llama and Qwen: every column has whole query heads of one key-value head, which its neighbors share."""
    heads = Heads(queries, keys, 128, columns)
    assert heads.sharing == columns // keys and heads.keys_here == 1
    groups = heads.order.reshape(columns, -1) // (queries // keys)
    used = np.where(heads.order.reshape(columns, -1) < 0, groups.max(1, keepdims=True), groups)
    assert (used == used[:, :1]).all()
    assert sorted(heads.order[heads.order >= 0]) == list(range(queries))
    assert [span.size for span in heads.segments] == [queries * 128, keys * 128, keys * 128]


def test_query_heads_have_their_own_keys_wherever_a_column_counts_them_in_groups():
    """Attention takes query head i of a column to key-value head i // (queries / keys there), unless they cross."""
    crossing = set()
    for queries, per_key, columns in itertools.product(range(1, 25), range(1, 13), range(1, 13)):
        if queries % per_key == 0:
            heads = Heads(queries, queries // per_key, 4, columns)
            if heads.crossing:
                crossing.add((queries, queries // per_key, columns))
                continue
            groups = heads.order.reshape(columns * heads.keys_here, -1)
            assert all(len({head // per_key for head in group if head >= 0}) <= 1 for group in groups)
    assert {(12, 3, 2), (12, 3, 4), (8, 2, 3)} <= crossing


def test_padding_is_described_and_refused_above_a_quarter():
    assert "heads 12 to 16 (25.0%)" in describe_plan(make(GPT, "1x8", ParallelConfig("megatron")).plan)
    with pytest.raises(ValueError, match=r"model.heads=5 .* 8 columns .* 38% .*\[1, 2\]"):
        make(ModelConfig(layers=1, width=20, heads=5, vocab_size=31), "1x8", ParallelConfig("megatron"))


def test_automatic_slices_are_one_where_nothing_overlaps_and_more_where_something_may():
    """CPU devices wait for every collective; a mesh without devices may stand for any accelerator."""
    mesh, model = make_mesh(parse_mesh("2x4")), ModelConfig(layers=1, width=64, heads=8, vocab_size=64)
    slices = {
        at: {
            plan.slices for block, _ in make_plan(ParallelConfig(), model, at, 8, SEQ).groups for plan in block.products
        }
        for at in (mesh, mesh.abstract_mesh)
    }
    assert slices[mesh] == {1} and max(slices[mesh.abstract_mesh]) > 1
