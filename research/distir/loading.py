"""Steps that begin by loading their inputs from a root device, as the notebook's untransformed programs do."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mstrain.simulator.placement import Placement
from mstrain.simulator.program import OpSpec, Program, Ragged
from mstrain.simulator.replicas import Step

Prologue = tuple[tuple[OpSpec, tuple[int, ...]], ...]


@dataclass(frozen=True, eq=False)
class LoadingStep(Step):
    """A step with a `prologue`: operations on explicit devices that run once, before everything else."""

    prologue: Prologue = ()

    @property
    def alike(self) -> bool:
        return False

    def expand(self, placement: Placement) -> Program:
        return _with_prologue(super().expand(placement), self.prologue)


def _with_prologue(program: Program, prologue: Prologue) -> Program:
    extra = len(prologue)
    specs, groups = program.specs, program.groups

    def empty_first(lists: Ragged) -> Ragged:
        return Ragged(np.concatenate([np.zeros(extra, np.int64), lists.offsets]), lists.items)

    return Program(
        specs=specs + tuple(spec for spec, _ in prologue),
        groups=groups + tuple(group for _, group in prologue),
        spec=np.concatenate([len(specs) + np.arange(extra), program.spec]),
        group=np.concatenate([len(groups) + np.arange(extra), program.group]),
        microbatch=np.concatenate([np.full(extra, -1), program.microbatch]),
        copies=np.concatenate([np.ones(extra, np.int64), program.copies]),
        inputs=empty_first(program.inputs),
        outputs=empty_first(program.outputs),
        value_bytes=program.value_bytes,
        value_device=program.value_device,
        resident=program.resident,
        category=program.category,
        devices=tuple(sorted({*program.devices, *(device for _, group in prologue for device in group)})),
    )
