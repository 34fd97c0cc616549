"""The program that is simulated, executed on emulated devices, trains the model of train.py.

Loss and gradients are compared with those of the sequential `Transformer`; nothing but collectives and
messages moves a value from one device to another.
"""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest

from mstrain.models.config import ModelConfig
from mstrain.models.plan import canonical_plan
from mstrain.models.transformer import Transformer
from tests.planner.executor import Executor
from tests.planner.plans import ask, cost, pod_plan

SEQ, BATCH = 6, 16
MODEL = ModelConfig(
    "tiny", layers=4, width=16, heads=4, num_kv_heads=2, mlp_dim=24, vocab_size=48, context=SEQ, norm="rmsnorm",
    norm_bias=False, position="none", activation="silu", gated=True, bias="none", tied=False,
)  # fmt: skip
TIED = dataclasses.replace(MODEL, tied=True)
PLAIN = dataclasses.replace(MODEL, norm="layernorm", gated=False, num_kv_heads=4)
GENERATOR = np.random.default_rng(0)
TOKENS, TARGETS = GENERATOR.integers(0, 48, (2, BATCH, SEQ), dtype=np.int32)


@functools.cache
def sequential(model):
    """(loss, gradients, weights) of the whole model, by the executor's names."""
    module = Transformer(model, canonical_plan(model), SEQ)

    def loss(parameters):
        return module.apply(parameters, TOKENS.ravel(), TARGETS.ravel(), method="loss").mean()

    def weight(path, leaf):
        scale = "scale" in jax.tree_util.keystr(path)  # of a norm, which the program leaves out
        return np.ones(leaf.shape, leaf.dtype) if scale else 0.2 * generator.normal(size=leaf.shape)

    generator = np.random.default_rng(1)
    shapes = jax.eval_shape(module.init, jax.random.key(0), TOKENS.ravel())
    parameters = jax.tree_util.tree_map_with_path(weight, shapes)
    parameters = jax.tree.map(lambda leaf: leaf.astype(np.float32), parameters)
    value, gradients = jax.jit(jax.value_and_grad(loss))(parameters)
    return float(value), named(gradients, model), named(parameters, model)


def named(tree, model):
    """Kernels by (layer, product), the table and the output projection, float64."""
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    result = {}
    for path, leaf in leaves.items():
        leaf = np.asarray(leaf, np.float64)
        half = next((name for name in ("attention", "mlp") if f"'{name}'" in path), None)
        if half and leaf.ndim == 3:
            into = leaf.shape[1:] == widths(model)[f"{half} in"] and "down" not in path and "out" not in path
            for layer in range(model.layers):
                result[layer, f"{half} {'in' if into else 'out'}"] = leaf[layer]
        elif leaf.ndim == 2 and leaf.shape[0] == model.vocab_size:
            result["table"] = leaf
        elif leaf.ndim == 2 and leaf.shape[1] == model.vocab_size:
            result["output"] = leaf
    assert len(result) == 4 * model.layers + 2 - model.tied, sorted(leaves)
    return result


def widths(model):
    qkv = (model.heads + 2 * model.num_kv_heads) * model.head_dim
    up = model.mlp_dim * (2 if model.gated else 1)
    return {"attention in": (model.width, qkv), "mlp in": (model.width, up)}


def costed_plan(plan, model, **keys):
    request = ask(model, cluster="v4-64", batch=BATCH, seq=SEQ, **keys)
    return request, cost(request, plan)


def execute(plan, model=MODEL, **keys):
    """Run the program of `plan`; compare loss and gradients of every replica with the sequential model's."""
    config, costed = costed_plan(plan, model, **keys)
    loss, gradients, weights = sequential(model)
    weights = {"output": weights["table"].T, **weights}  # its copy, where the table is tied
    run = Executor(config, costed, plan.microbatches, weights, TOKENS, TARGETS)
    assert run.run() == pytest.approx(loss, rel=1e-5)
    for replica in run.gradients:
        for name, wanted in gradients.items():
            scale = np.abs(wanted).max()
            np.testing.assert_allclose(replica[name], wanted, rtol=0, atol=1e-5 * scale, err_msg=str(name))
    return run


SCHEDULES, REMATS = ("1f1b", "gpipe", "interleaved"), ("none", "dots", "full")
COMBINATIONS = [
    (*degrees, schedule)
    for degrees in itertools.product((1, 2), (1, 2), (1, 2), (1, 2, 4))
    for schedule in (SCHEDULES if degrees[2] > 1 else SCHEDULES[:1])
    if schedule != "interleaved" or degrees[3] % degrees[2] == 0
]


@pytest.mark.parametrize("algorithm", ["megatron", "meshslice", "fsdp"])
def test_every_combination_of_degrees_computes_what_one_device_does(algorithm):
    """Data x tensor x pipeline x microbatches x schedule, with every remat in turn."""
    for number, (data, tensor, pipeline, microbatches, schedule) in enumerate(COMBINATIONS):
        cols = 1 if algorithm == "fsdp" else tensor
        remat = REMATS[number % 3]
        shard = "optimizer" if data > 1 else "none"
        degrees = (data, algorithm, tensor // cols, cols, pipeline, microbatches)
        execute(pod_plan(*degrees, remat, shard=shard, schedule=schedule))


MESHES = {
    "tall": (pod_plan(1, "meshslice", 2, 1, 1, 1, "none", slices="4"), {"os", "ls"}),
    "square": (pod_plan(1, "meshslice", 2, 2, 1, 1, "dots", slices="2"), {"os", "ls"}),
    "tokens in slices": (pod_plan(1, "meshslice", 2, 1, 1, 4, "full", slices="2"), {"rs"}),
    "turned": (pod_plan(2, "meshslice", 2, 2, 2, 4, "dots", shard="optimizer"), {"rs"}),
    "wide": (pod_plan(1, "meshslice", 2, 4, 2, 1, "full", slices="2"), {"os", "ls"}),
    "high": (pod_plan(1, "meshslice", 4, 2, 2, 1, "none", slices="2"), {"os", "ls"}),
}


@pytest.mark.parametrize("name", MESHES)
def test_two_dimensional_products_are_those_of_one_device(name):
    """Every dataflow, in slices, on square meshes and others, layernorm and a plain MLP."""
    plan, dataflows = MESHES[name]
    run = execute(plan, PLAIN)
    assert {product.layout.dataflow for product in run.products.block} == dataflows
    travelling = {run.program.specs[spec].kind for spec in run.program.spec}
    assert {"AllGather", "ReduceScatter", "AllReduce"} <= travelling or plan.data == 1


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_both_copies_of_a_tied_table_get_the_whole_gradient(schedule):
    for data, pipeline, microbatches in itertools.product((1, 2), (1, 2), (2, 4)):
        plan = pod_plan(data, "meshslice", 1, 1, pipeline, microbatches, "dots", schedule=schedule)
        run = execute(plan, TIED)
        for replica in run.gradients if pipeline > 1 else ():
            np.testing.assert_array_equal(replica["output"], replica["table"].T)


def test_a_collective_over_the_wrong_devices_is_noticed():
    """Otherwise the tests above would prove nothing."""
    config, costed = costed_plan(pod_plan(1, "meshslice", 2, 2, 1, 1, "none"), MODEL)
    run = Executor(config, costed, 1, sequential(MODEL)[2], TOKENS, TARGETS)
    program = run.program
    gather = next(op for op, spec in enumerate(program.spec) if program.specs[spec].kind == "ReduceScatter")
    program.inputs.items[program.inputs.offsets[gather]] += 2  # a device of the other row
    with pytest.raises(AssertionError):
        run.run()


class Deaf(Executor):
    """Replicas that keep their gradients to themselves."""

    def communicate(self, kind, label, lists, outs):
        if label[0] == "gradients":
            return [self.merged([values[member] for values in lists]) for member in range(len(outs))]
        return super().communicate(kind, label, lists, outs)


def test_a_missing_sum_over_replicas_is_noticed():
    config, costed = costed_plan(pod_plan(2, "meshslice", 1, 1, 2, 2, "none"), MODEL)
    loss, gradients, weights = sequential(MODEL)
    run = Deaf(config, costed, 2, weights, TOKENS, TARGETS)
    assert run.run() == pytest.approx(loss, rel=1e-5)
    for name, wanted in gradients.items():
        assert np.abs(run.gradients[0][name] - wanted).max() > 1e-2 * np.abs(wanted).max()
