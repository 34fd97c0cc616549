"""Transformed programs compute what the sequential model computes: executed with numpy, value by value."""

import dataclasses

import numpy as np
import pytest

from mstrain.simulator.placement import Degrees, Placement
from research.distir.mlp import Mlp
from research.distir.rules import RULES
from research.distir.transform_mlp import mlp_step
from tests.simulator.everything import expand

MLP = Mlp(8, 6, 12, 18, 24)
GENERATOR = np.random.default_rng(0)
WEIGHTS = [0.5 * GENERATOR.normal(size=MLP.dims(layer)) for layer in range(MLP.layers)]
X, Z = GENERATOR.normal(size=(MLP.batch, 6)), GENERATOR.normal(size=(MLP.batch, 18))


def sequential():
    """(sum of squares / 2, gradients) of the whole model."""
    before, after = [], [X]
    for weight in WEIGHTS:
        before.append(after[-1] @ weight)
        after.append(np.maximum(before[-1], 0))
    gradient, gradients = after[-1] - Z, []
    loss = 0.5 * np.sum(gradient**2)
    for value, y, weight in zip(after[-2::-1], before[::-1], WEIGHTS[::-1]):
        gradient = gradient * (y > 0)
        gradients.append(value.T @ gradient)
        gradient = gradient @ weight.T
    return loss, gradients[::-1]


def shard(layer: int, rank: int, ranks: int) -> np.ndarray:
    return np.split(WEIGHTS[layer], ranks, axis=1 - layer % 2)[rank]


def resident_values(step, degrees, rules) -> dict[int, np.ndarray]:
    """Inputs of the expanded program: weights, and the rows of x and z of every replica and microbatch."""
    d, h, k = degrees.data, degrees.tensor, degrees.microbatches
    singles, repeated = len(step.slots.single), len(step.slots.repeated)
    values = {}
    for replica in range(d):
        for rank in range(h):
            mine = replica * h + rank
            if rules.batch_count:
                values[mine] = np.array(MLP.batch)
            for layer in range(MLP.layers):
                values[(singles - MLP.layers + layer) * d * h + mine] = shard(layer, rank, h)
            for m in range(k):
                for slot, whole in enumerate((X, Z)):
                    piece = np.split(whole, d * k)[replica * k + m]
                    values[(singles + m * repeated + slot) * d * h + mine] = piece
    return values


def execute(program, values):
    """Run `program` on `values`; returns (weight, gradient) of every optimizer, and the losses."""
    updates, losses = [], {}
    for op in range(len(program.spec)):
        kind = program.specs[program.spec[op]].kind
        ins = program.inputs.items[program.inputs.offsets[op] : program.inputs.offsets[op + 1]].tolist()
        outs = program.outputs.items[program.outputs.offsets[op] : program.outputs.offsets[op + 1]].tolist()
        if kind == "SGD":
            half = len(ins) // 2
            updates += [(weight, values[gradient]) for weight, gradient in zip(ins[:half], ins[half:])]
            continue
        for device in {program.value_device[value] for value in ins}:
            assert device in program.groups[program.group[op]]
        args = [values[value] for value in ins]
        values.update(zip(outs, results_of(kind, args)))
        if kind == "Loss":
            losses[outs[0]] = values[outs[0]]
    return updates, losses


def results_of(kind, args):
    if kind == "AllReduce":
        return [sum(args)] * len(args)
    if kind == "MatMulGrad":
        return [args[2] @ args[1].T, args[0].T @ args[2]]
    if kind == "Loss":
        return [0.5 * np.sum((args[0] - args[1]) ** 2)]
    single = {
        "MatMul": lambda x, w: x @ w,
        "Relu": lambda y: np.maximum(y, 0),
        "LossGrad": lambda a, z, *count: a - z,
        "ReluGrad": lambda y, g: g * (y > 0),
        "WeightGrad": lambda x, g: x.T @ g,
        "Identity": lambda x: x,
        "Send": lambda x: x,
        "Add": lambda a, b: a + b,
        "Concat": lambda a, b: np.concatenate([np.atleast_1d(a), np.atleast_1d(b)]),
    }
    return [single[kind](*args)]


def gradients_of(degrees, rules, schedule=None):
    """Per replica, the gradients the optimizers of the expanded program see, joined from their shards."""
    rules = dataclasses.replace(rules, schedule=schedule or rules.schedule, gather_outputs=False)
    step = mlp_step(MLP, degrees, rules)
    program = expand(step, Placement(degrees, rules.axis_order))
    values = resident_values(step, degrees, rules)
    updates, losses = execute(program, values)
    ranks, singles = degrees.data * degrees.tensor, len(step.slots.single)
    parts = {}
    for weight, gradient in updates:
        slot, mine = divmod(weight, ranks)
        replica, rank = divmod(mine, degrees.tensor)
        parts[slot - (singles - MLP.layers), replica, rank] = gradient
    assert len(parts) == MLP.layers * ranks
    for replica in range(degrees.data):
        yield [
            np.concatenate([parts[layer, replica, rank] for rank in range(degrees.tensor)], axis=1 - layer % 2)
            for layer in range(MLP.layers)
        ]
    assert sum(losses.values()) / degrees.tensor == pytest.approx(sequential()[0], rel=1e-10)


PLANS = [
    (Degrees(), None),
    (Degrees(3), None),
    (Degrees(1, 3), None),
    (Degrees(1, 1, 4, 4), None),
    (Degrees(1, 1, 3, 6), "gpipe"),
    (Degrees(2, 3, 2, 3), None),
    (Degrees(2, 2, 4, 2), "distir"),
    (Degrees(2, 1, 2, 4, interleave=3), None),
    (Degrees(1, 2, 8, 3), "1f1b"),
]


@pytest.mark.parametrize("rules", ["corrected", "head"])
@pytest.mark.parametrize("degrees,schedule", PLANS)
def test_every_replica_gets_the_sequential_gradients(rules, degrees, schedule):
    rules = dataclasses.replace(RULES[rules], first=0, optimizer="all")
    wanted = sequential()[1]
    for replica in gradients_of(degrees, rules, schedule):
        for found, gradient in zip(replica, wanted):
            np.testing.assert_allclose(found, gradient, rtol=1e-9, atol=1e-12)


def test_the_notebook_sums_gradients_over_the_wrong_group():
    rules = dataclasses.replace(RULES["notebook"], optimizer="all")
    wanted = sequential()[1]
    assert all(np.allclose(*pair) for pair in zip(next(gradients_of(Degrees(2), rules)), wanted))
    assert not any(np.allclose(*pair) for pair in zip(next(gradients_of(Degrees(2, 2), rules)), wanted))
