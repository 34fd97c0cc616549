"""All choices of a stage as arrays for one microbatch size, with the bounds of the rest of the pipeline."""

import itertools
from dataclasses import dataclass, field

import numpy as np

from mstrain.planner.mixed.cost import Model, Stage, build_stage
from mstrain.planner.mixed.space import Choice


@dataclass(frozen=True)
class Space:
    """Choices of a stage, and states: units left per kind, row-major, so taking devices lowers the index.

    Rows are twice as long as they need to be, so that taking more than there is leads to no state.
    """

    unit: int
    choices: tuple[Choice, ...]
    group_of: np.ndarray  # (C,) number of the distinct device counts of a choice, each after its subsets
    offsets: np.ndarray  # (G,)
    fits: np.ndarray  # (G, S)
    contains: np.ndarray  # (G, G) whether the first group has the devices of the second
    real: np.ndarray  # (S,) whether an index is that of a state; the last one is, with all devices


def build_space(model: Model, unit: int, choices: tuple[Choice, ...]) -> Space:
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
    """Stages for one microbatch size: C usable choices, G groups, L layers, S states."""

    samples: int
    microbatches: int
    stages: tuple[Stage, ...]
    offsets: np.ndarray  # (C,)
    fits: np.ndarray  # (S, C)
    stage_ms: np.ndarray  # (L + 1, L + 1, C) for layers [begin, end); infinite where memory never suffices
    end_ms: np.ndarray  # (L + 1, L + 1, C)
    flights: np.ndarray  # (L + 1, L + 1, C) microbatches that fit in memory
    groups: np.ndarray  # (C,) number of the device group of each choice


@dataclass(frozen=True)
class Box:
    """Plans whose slowest stage and largest end of iteration (ms) lie between limits; their heads' bound."""

    tables: Tables
    slowest: tuple[float, float]
    finish: tuple[float, float]
    total: np.ndarray  # (L + 1, S) least sum of stage times of the first layers on the devices left
    expanded: dict[tuple[int, int], list] = field(init=False, default_factory=dict)  # its tails, see search


def usable_stages(model: Model, space: Space, samples: int) -> dict[int, Stage]:
    """Stages by number of the choice, without those for which the profiles end too early."""
    built = ((index, build_stage(model, choice, samples)) for index, choice in enumerate(space.choices))
    return {index: stage for index, stage in built if stage is not None}


def build_tables(model: Model, space: Space, samples: int, microbatches: int, stages: dict[int, Stage]) -> Tables:
    """The tables of a microbatch size, of `stages` by number of the choice. Entries with begin >= end mean nothing."""
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
        flights, groups,
    )  # fmt: skip


def quick_bound(model: Model, stages: dict[int, Stage]) -> tuple[float, float]:
    """Lower bounds without tables: of the slowest stage (device time needed / there) and of the sum of all.

    Devices are weighted by their speed; any weights give a valid bound.
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
