"""Programs of all devices of a step, with which tests compare the program of one rank."""

from collections.abc import Sequence

import numpy as np

from mstrain.simulator.cluster import Cluster
from mstrain.simulator.costs import Rules
from mstrain.simulator.placement import GROUP, SEND, STAGES, Degrees, Placement
from mstrain.simulator.program import Program, Ragged, distinct
from mstrain.simulator.replicas import Step
from mstrain.simulator.simulate import CORRECTED, Simulation, simulate


def rank_groups(degrees: Degrees) -> list[np.ndarray]:
    """For each axis, an int array (groups, members) of the ranks that take part in an operation."""
    ranks = np.arange(degrees.data * degrees.tensor).reshape(degrees.data, degrees.rows, degrees.cols)
    replicas, own = ranks.reshape(degrees.data, -1), ranks.reshape(-1, 1)
    by_column = ranks.swapaxes(1, 2).reshape(-1, degrees.rows)
    return [own, replicas, replicas.T, own, by_column, ranks.reshape(-1, degrees.cols), own[:1], own]


def expand(step: Step, placement: Placement) -> Program:
    """The program of every rank of every replica."""
    members, degrees = rank_groups(step.degrees), step.degrees
    number = np.array([len(groups) for groups in members])
    axes = np.array([op.axis for op in step.ops], np.int64)
    copies = number[axes[step.row]]
    op = np.repeat(step.row, copies)
    at = np.repeat(np.arange(len(step.row)), copies)
    copy = np.arange(len(op)) - np.repeat(np.cumsum(copies) - copies, copies)
    where, places = distinct([(op.axis, op.stage, op.peer) for op in step.ops])
    code, group = np.unique(where[op] * number.max() + copy, return_inverse=True)
    groups = tuple(
        _devices(step, placement, members, places[place], its_copy)
        for place, its_copy in zip(*(part.tolist() for part in np.divmod(code, number.max())))
    )
    spec, specs = distinct([op.spec for op in step.ops])
    label, labels = distinct([op.label for op in step.ops])
    ranks = degrees.data * degrees.tensor
    nbytes, stage, resident, category = step.slots.table(degrees.microbatches)
    every = np.divmod(np.arange(ranks), degrees.tensor)
    devices = placement.worker(*every, np.arange(degrees.pipeline)[:, None]).ravel().tolist()
    return Program(
        specs=specs,
        groups=groups,
        spec=spec[op],
        group=group,
        microbatch=step.microbatch[at],
        copies=np.ones(len(op), np.int64),
        inputs=_values(step, [op.inputs for op in step.ops], op, at, copy, members),
        outputs=_values(step, [op.outputs for op in step.ops], op, at, copy, members),
        value_bytes=np.repeat(nbytes, ranks),
        resident=np.repeat(resident, ranks),
        category=np.repeat(category, ranks),
        value_device=placement.worker(*every, stage[:, None]).ravel(),
        devices=tuple(sorted({*devices, *(device for members in step.groups for device in members)})),
        labels=labels,
        label=label[op] if any(labels) else None,
    )


def _devices(step: Step, placement: Placement, members, where: tuple[int, int, int], copy: int) -> Sequence[int]:
    """The devices of one operation; `where` is its axis, stage and peer."""
    axis, stage, peer = where
    if axis == GROUP:
        return step.groups[peer]
    replica, rank = np.divmod(members[axis][copy], step.degrees.tensor)
    stages = {SEND: [stage, peer], STAGES: range(step.degrees.pipeline)}.get(axis, stage)
    return tuple(np.atleast_1d(placement.worker(replica, rank, np.array(stages))).tolist())


def _values(step: Step, slots: Sequence[Sequence[int]], op, at, copy, members: list[np.ndarray]) -> Ragged:
    """Value numbers per operation: a collective touches the value of every member, the rest that of their own."""
    lists = Ragged.of(slots).take(op)
    owner = lists.owner()
    items = step.slots.numbers(lists.items, step.microbatch[at][owner])
    axis = np.array([op.axis for op in step.ops])[op]
    width, size = (np.array([part(groups) for groups in members]) for part in (lambda g: g.shape[1], np.size))
    times = width[axis[owner]]
    items, owner = np.repeat(items, times), np.repeat(owner, times)
    member = np.arange(len(items)) - np.repeat(np.cumsum(times) - times, times)
    first = (np.cumsum(size) - size)[axis] + copy * width[axis]
    rank = np.concatenate([groups.ravel() for groups in members])[first[owner] + member]
    return Ragged(np.concatenate([[0], np.cumsum(lists.lengths * width[axis])]), items * members[0].size + rank)


def simulate_everything(step: Step, cluster: Cluster, rules: Rules = CORRECTED) -> Simulation:
    """Simulates every device of the step."""
    return simulate(expand(step, Placement(step.degrees, rules.axis_order, rules.first)), cluster, rules)
