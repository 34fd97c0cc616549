"""Compute and exposed communication of a predicted step by kind of layer."""

import re

import numpy as np

from mstrain.compiler import Compiled, Schedule
from mstrain.compiler.hlo import parse

# First match wins; op names are Flax module paths, as JAX leaves them in the compiled text.
RULES = (
    ("multi-token prediction", r"/mtp_\d+[/_.]"),
    ("attention", r"/attention[/_.]"),
    ("mlp", r"/mlp[/_.]"),
    ("rest of the blocks", r"blocks_\d+"),
    ("embedding", r"/(embedding|positions)[/_.]"),
    ("head and loss", r"Transformer"),
    ("optimizer", r"jit\(step\)"),
)
KINDS = (*(kind for kind, _ in RULES), "unnamed (copies, loops)")


def kind_of(op_name: str) -> str:
    """The kind of layer an operation belongs to."""
    return next((kind for kind, rule in RULES if re.search(rule, op_name)), KINDS[-1])


def seconds_by_kind(program: Compiled, schedule: Schedule) -> dict[str, tuple[float, float]]:
    """Seconds of (compute, exposed communication) of each kind of the program; their sum is the time of the schedule.

    Idle time of the TensorCore is attributed to the transfers that end in it; each gets the time from the end of the
    previous transfer.
    """
    timeline = schedule.timeline
    number = [KINDS.index(kind) for kind in _kinds_of_names(program.text, timeline.names)]
    kinds = np.array(number, int)[timeline.name]
    core = ~timeline.communication
    compute = np.bincount(kinds[core], timeline.duration[core], len(KINDS))
    exposed = np.zeros(len(KINDS))
    ends = (timeline.start + timeline.duration)[~core]
    order = np.argsort(ends)
    ends, owners = ends[order], kinds[~core][order]
    begins = np.append(timeline.start[core], schedule.seconds)
    stops = np.insert((timeline.start + timeline.duration)[core], 0, 0.0)
    for begin, end in zip(stops, begins, strict=True):
        if end > begin:
            first, last = np.searchsorted(ends, (begin, end), side="right")
            np.add.at(exposed, owners[first:last], np.diff(ends[first:last], prepend=begin))
    return {kind: (float(compute[i]), float(exposed[i])) for i, kind in enumerate(KINDS) if i in number}


def _kinds_of_names(text: str, names: tuple[str, ...]) -> list[str]:
    op_names = {}
    for body in parse(text).computations.values():
        for instruction in body:
            if match := re.search(r'op_name="([^"]*)"', instruction.attributes):
                op_names[instruction.name] = match[1]
    return [kind_of(op_names.get(name, "")) for name in names]
