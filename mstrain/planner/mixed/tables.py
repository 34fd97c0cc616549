"""The choices of a stage as arrays, for all layer ranges at one microbatch size."""

import itertools
from dataclasses import dataclass, field

import numpy as np

from mstrain.planner.mixed.cost import Model, Stage, build_stage
from mstrain.planner.mixed.space import Choice


@dataclass(frozen=True)
class Space:
    """The choices of a stage, and the states: numbers of remaining units by kind.

    The index of a state is row-major, so that taking devices subtracts a constant. Rows are twice as long as needed, so
    that taking more devices than remain leads to an index that is not a state. C choices, G device groups, S indices.
    """

    unit: int
    choices: tuple[Choice, ...]
    group_of: np.ndarray  # (C,) device group of a choice: its device counts; a group comes after its subsets
    offsets: np.ndarray  # (G,) difference of the state index when the devices of a group are taken
    fits: np.ndarray  # (G, S) whether the state has the devices of the group
    contains: np.ndarray  # (G, G) whether the first group has the devices of the second
    real: np.ndarray  # (S,) whether the index is that of a state; the last one is the state with all devices


def build_space(model: Model, unit: int, choices: tuple[Choice, ...]) -> Space:
    """The space of `choices` on the nodes of `model`, in units of `unit` devices."""
    groups = tuple(sorted({choice.devices for choice in choices}))
    counts = [kind.devices // unit for kind in model.kinds]
    strides = np.cumprod([1, *(2 * count + 1 for count in counts[:0:-1])])[::-1]
    states = np.array(list(itertools.product(*(range(count + 1) for count in counts))))
    numbers = states @ strides
    real = np.zeros(numbers[-1] + 1, bool)
    real[numbers] = True
    units = np.array(groups) // unit
    fits = np.zeros((len(groups), len(real)), bool)
    fits[:, numbers] = (states[None] >= units[:, None, :]).all(axis=2)
    group_of = np.array([groups.index(choice.devices) for choice in choices])
    contains = np.asarray((units[:, None, :] >= units[None]).all(axis=2))
    return Space(unit, choices, group_of, units @ strides, fits, contains, real)


@dataclass(frozen=True)
class Tables:
    """Stages for one microbatch size: C usable choices, L layers, S state indices."""

    samples: int  # per microbatch
    microbatches: int
    stages: tuple[Stage, ...]  # C
    offsets: np.ndarray  # (C,) difference of the state index when the devices of a choice are taken
    fits: np.ndarray  # (S, C) whether the state has the devices of the choice
    stage_ms: np.ndarray  # (L + 1, L + 1, C) ms for layers [begin, end); infinite if they never fit in memory
    end_ms: np.ndarray  # (L + 1, L + 1, C) ms of gradient exchange and update
    flights: np.ndarray  # (L + 1, L + 1, C) microbatches that fit in memory
    groups: np.ndarray  # (C,) number of the device group of each choice
    generator_ms: np.ndarray  # (C,) ms of the batch generator if the choice is the first stage


@dataclass(frozen=True)
class Box:
    """The plans whose slowest stage and longest exchange and update (ms) are within limits."""

    tables: Tables
    slowest: tuple[float, float]
    finish: tuple[float, float]
    total: np.ndarray  # (L + 1, S) least sum of stage times of the first layers on the remaining devices, in ms
    expanded: dict[tuple[int, int], list] = field(init=False, default_factory=dict)  # tails, see `Search.dominated`


def usable_stages(model: Model, space: Space, samples: int) -> dict[int, Stage]:
    """Stages by number of the choice, except those whose replicas get more samples than the profiles have."""
    built = ((index, build_stage(model, choice, samples)) for index, choice in enumerate(space.choices))
    return {index: stage for index, stage in built if stage is not None}


def build_tables(model: Model, space: Space, samples: int, microbatches: int, stages: dict[int, Stage]) -> Tables:
    """The tables of a microbatch size, for `stages` by number of the choice. Entries with begin >= end are invalid."""
    fewest = model.options.in_flight(microbatches, 1)
    bounds = np.arange(model.layers + 1)
    layers, rows = (bounds[:, None], bounds[None]), []
    for stage in stages.values():
        times, fitting = stage.times(model, *layers), stage.fitting(*model.held(*layers))
        rows.append((np.where(fitting >= fewest, times.stage, np.inf), times.end, fitting.astype(np.int32)))
    stage_ms, end_ms, flights = (np.stack(each, axis=-1) for each in zip(*rows))
    groups = space.group_of[list(stages)]
    return Tables(
        samples, microbatches, tuple(stages.values()), space.offsets[groups], space.fits[groups].T, stage_ms, end_ms,
        flights, groups, np.array([stage.generator_ms for stage in stages.values()]),
    )  # fmt: skip


def quick_bound(model: Model, stages: dict[int, Stage]) -> tuple[float, float]:
    """Lower bounds without tables, in ms: of the slowest stage and of the sum of all stages.

    The bound of the slowest stage is the device time that all layers need, divided by the number of devices. Devices
    are weighted by their speed; any weights give a valid bound.
    """
    every = model.times.items()
    fastest = [
        min(times.total_ms[1] for (index, _), times in every if index == kind) for kind in range(len(model.kinds))
    ]
    weights = np.array([1.0 / ms for ms in fastest])
    slowest_kind = [stage.compute_ms[stage.compute_ms[:, -1].argmax()] for stage in stages.values()]
    layer_ms = np.diff(np.array(slowest_kind), axis=1)
    power = np.array([stage.choice.devices for stage in stages.values()]) @ weights
    needed = (layer_ms * power[:, None]).min(axis=0).sum()
    there = weights @ np.array([kind.devices for kind in model.kinds])
    return needed / there, layer_ms.min(axis=0).sum()
