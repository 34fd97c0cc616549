"""The table of a pipelined step: complete, with the ideal bubble, and no saved value overwritten before it is read."""

import re

import numpy as np
import pytest

from mstrain.models.stages import PipelineConfig, make_stages
from mstrain.parallel.schedules import BACKWARD, FORWARD, lockstep_slots, schedule
from mstrain.program.pipeline import table_of

SHAPES = [
    ("gpipe", 2, 3, 1), ("gpipe", 4, 1, 1), ("1f1b", 2, 8, 1), ("1f1b", 4, 8, 1), ("1f1b", 4, 2, 1),
    ("interleaved", 2, 4, 2), ("interleaved", 4, 8, 3),
]  # fmt: skip


@pytest.mark.parametrize("name, stages, microbatches, per_stage", SHAPES)
def test_every_tick_counts_and_the_bubble_is_that_of_the_schedule(name, stages, microbatches, per_stage):
    table = table_of(name, stages, microbatches, per_stage * stages)
    used = table.active.any(axis=2).sum(axis=0).tolist()
    assert used == [per_stage * microbatches + stages - 1] * 2  # the passes of a stage, and p - 1 that it waits
    assert (table.active.sum(axis=0) == per_stage * microbatches).all()
    limit = {"gpipe": microbatches, "1f1b": 2 * stages - 1, "interleaved": (per_stage + 1) * stages}[name]
    assert table.slots == lockstep_slots(name, stages, microbatches, per_stage) <= limit + 1


@pytest.mark.parametrize("name, stages, microbatches, per_stage", SHAPES)
def test_lockstep_of_equal_stages_takes_no_longer_than_the_simulator_s_schedule(name, stages, microbatches, per_stage):
    seconds = (1, 2)  # of a forward and a backward pass
    active = table_of(name, stages, microbatches, per_stage * stages).active.any(axis=2)
    free, done = [0] * stages, {}
    for step in schedule(name, stages, microbatches, per_stage * stages):
        for task in step:  # a stage starts a task when it is free and what the task reads has arrived
            neighbor = (task.chunk + (1 if task.direction else -1), task.direction, task.microbatch)
            begin = max(free[task.stage], done.get(neighbor, 0))
            free[task.stage] = done[task[1:]] = begin + seconds[task.direction]
    assert np.sum(active * np.array(seconds)) == max(free)


@pytest.mark.parametrize("name, stages, microbatches, per_stage", SHAPES)
def test_what_a_forward_pass_saves_is_there_in_its_backward_pass(name, stages, microbatches, per_stage):
    table = table_of(name, stages, microbatches, per_stage * stages)
    for stage in range(stages):
        saved: dict[int, tuple | None] = {}
        done = []
        for t in range(len(table.active)):
            for direction in (FORWARD, BACKWARD):
                at = t, direction, stage
                key = (table.chunk[at], table.microbatch[at]) if table.active[at] else None
                if direction == FORWARD and table.active[t, FORWARD].any():
                    saved[table.slot[at]] = key  # also where no pass counts: what it computes is stored
                elif key is not None:
                    assert saved[table.slot[at]] == key
                    done.append(key)
        assert len(set(done)) == per_stage * microbatches


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
    ({"schedule": "zigzag"}, "Choose one of gpipe, 1f1b, interleaved"),
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
