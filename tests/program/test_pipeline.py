"""The table of a pipelined step: complete, with the ideal bubble, and no saved value overwritten before it is read."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mstrain.models.halves import halve
from mstrain.models.stages import PipelineConfig, make_stages
from mstrain.parallel.schedules import BACKWARD, FORWARD, WEIGHTS, deferred_slots, lockstep_slots, schedule
from mstrain.program.pipeline import table_of

SHAPES = [
    ("gpipe", 2, 3, 1), ("gpipe", 4, 1, 1), ("1f1b", 2, 8, 1), ("1f1b", 4, 8, 1), ("1f1b", 4, 2, 1),
    ("interleaved", 2, 4, 2), ("interleaved", 4, 8, 3),
]  # fmt: skip
DIVIDED = [("zero-bubble", 2, 4, 1), ("zero-bubble", 4, 8, 1), ("zero-bubble", 4, 2, 1), ("zero-bubble", 3, 1, 1)]


def seconds_by_itself(name: str, stages: int, microbatches: int, per_stage: int, seconds) -> int:
    """Of the simulator's schedule with passes of so many `seconds` by direction."""
    free, done = [0] * stages, {}
    for step in schedule(name, stages, microbatches, per_stage * stages):
        for task in step:  # a stage starts a task when it is free and what the task reads has arrived
            neighbor = (task.chunk + (1 if task.direction else -1), task.direction, task.microbatch)
            begin = max(free[task.stage], done.get(neighbor, 0) if task.direction != WEIGHTS else 0)
            free[task.stage] = done[task[1:]] = begin + seconds[task.direction]
    return max(free)


@pytest.mark.parametrize("name, stages, microbatches, per_stage", SHAPES)
def test_every_tick_counts_and_the_bubble_is_that_of_the_schedule(name, stages, microbatches, per_stage):
    table = table_of(name, stages, microbatches, per_stage * stages)
    used = table.active.any(axis=2).sum(axis=0).tolist()
    assert used == [per_stage * microbatches + stages - 1] * 2 + [0]  # a stage's passes, and p - 1 that it waits
    assert (table.active[:, :WEIGHTS].sum(axis=0) == per_stage * microbatches).all()
    limit = {"gpipe": microbatches, "1f1b": 2 * stages - 1, "interleaved": (per_stage + 1) * stages}[name]
    assert table.slots == lockstep_slots(name, stages, microbatches, per_stage) <= limit + 1


@pytest.mark.parametrize("name, stages, microbatches, per_stage", SHAPES)
def test_lockstep_of_equal_stages_takes_no_longer_than_the_simulator_s_schedule(name, stages, microbatches, per_stage):
    seconds = (1, 2, 0)  # of a forward and a backward pass
    active = table_of(name, stages, microbatches, per_stage * stages).active.any(axis=2)
    assert np.sum(active * np.array(seconds)) == seconds_by_itself(name, stages, microbatches, per_stage, seconds)


@pytest.mark.parametrize("name, stages, microbatches, per_stage", DIVIDED)
def test_all_stages_make_the_weight_gradients_of_a_microbatch_in_one_tick(name, stages, microbatches, per_stage):
    table = table_of(name, stages, microbatches, stages)
    used = table.active.any(axis=2).sum(axis=0).tolist()
    assert used == [microbatches + stages - 1] * 2 + [microbatches]  # no stage waits for weights
    assert (table.active.sum(axis=0) == microbatches).all()
    assert (
        table.slots == lockstep_slots(name, stages, microbatches, 1) == lockstep_slots("1f1b", stages, microbatches, 1)
    )
    assert table.deferred_slots == deferred_slots(name, stages, microbatches) <= stages
    if microbatches >= stages:  # ZB-H1: the simulator's stages also make weight gradients while others run passes
        seconds = seconds_by_itself(name, stages, microbatches, 1, (1, 1, 1))
        assert seconds == 3 * microbatches + stages - 1 == sum(used) - (stages - 1)


@pytest.mark.parametrize("name, stages, microbatches, per_stage", SHAPES + DIVIDED)
def test_what_a_pass_stores_is_there_when_a_later_one_reads_it(name, stages, microbatches, per_stage):
    table = table_of(name, stages, microbatches, per_stage * stages)
    for written, slots in ((FORWARD, table.slot), (BACKWARD, table.deferred)):
        for stage in range(stages):
            stored: dict[int, tuple | None] = {}
            for t, direction in np.ndindex(len(table.active), 3):
                at = t, direction, stage
                key = (table.chunk[at], table.microbatch[at]) if table.active[at] else None
                if direction == written and table.active[t, direction].any():
                    stored[slots[at]] = key  # also where no pass counts: what it computes is stored
                elif direction > written and key is not None:
                    assert stored[slots[at]] == key


def test_halves_compute_every_product_once():
    @jax.checkpoint
    def layer(weights, x):
        return x + jnp.tanh(jnp.tanh(x) @ weights["up"]) @ weights["down"]

    weights = {"up": jnp.full((4, 8), 0.1), "down": jnp.full((8, 4), 0.2)}
    x, dy = jnp.linspace(0, 1, 24).reshape(6, 4), jnp.linspace(1, 2, 24).reshape(6, 4)

    def gradients(known, dy):
        dw, dx = jax.vjp(layer, *known)[1](dy)
        return dx, dw

    early, late = halve(gradients, (weights, x), dy)
    dx, rest = early((weights, x), dy)
    found, expected = (dx, late((weights, x), rest)), gradients((weights, x), dy)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    products = [
        str(jax.make_jaxpr(half)((weights, x), last)).count("dot_general") for half, last in ((early, dy), (late, rest))
    ]
    assert products == [1 + 2, 2]  # the first again, both back; both weights
    assert sum(x.size for x in rest) == 2 * 6 * 8 + 6 * 4  # hidden features, their gradient, dy; not tanh(x)


def test_chunks_are_placed_in_turn_and_padded_to_the_deepest():
    even = make_stages(PipelineConfig(), 2, 4)
    uneven = make_stages(PipelineConfig("interleaved"), 2, 5)
    assert even and even.rows == (0, 1, 2, 3)
    assert uneven and uneven.rows == (0, 1, 3, -1, 2, -1, 4, -1)


@pytest.mark.parametrize("config, stages, layers, words", [
    (PipelineConfig("gpipe"), 1, 4, "pipeline.schedule=gpipe has no effect: the mesh has one stage. Remove it"),
    (PipelineConfig(), 8, 4, "model.layers=4 is less than the 8 chunks of 8 stages with pipeline.schedule=1f1b"),
    (PipelineConfig("interleaved"), 4, 6, "Type a mesh= with up to 3 stages"),
    (PipelineConfig("interleaved"), 2, 3, "Type a mesh= without stage"),
    (PipelineConfig(layers="3 3"), 2, 5, 'and this run has 2 chunks with 5 layers. Type pipeline.layers="3 2".'),
])  # fmt: skip
def test_a_division_that_does_not_fit_says_what_does(config, stages, layers, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        make_stages(config, stages, layers)


@pytest.mark.parametrize("keys, words", [
    ({"schedule": "zigzag"}, "Choose one of gpipe, 1f1b, interleaved, zero-bubble"),
    ({"schedule": "1f1b", "interleave": 2}, "type pipeline.schedule=interleaved pipeline.interleave=2"),
    ({"layers": "3,2"}, 'pipeline.layers="3 3 2"'),
])  # fmt: skip
def test_a_bad_key_says_what_to_type(keys, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        PipelineConfig(**keys)


def test_interleaving_says_how_many_microbatches_it_needs():
    stages = make_stages(PipelineConfig("interleaved"), 4, 8)
    assert stages
    stages.check_microbatches(8)
    with pytest.raises(ValueError, match="Type accumulate=4 or accumulate=8, or pipeline.schedule=1f1b"):
        stages.check_microbatches(6)
