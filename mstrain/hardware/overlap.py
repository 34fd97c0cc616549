"""Shares of collectives that run beside compute in compiled steps (overlap.toml), by generation and algorithm."""

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

TABLE = Path(__file__).with_name("overlap.toml")
PHASES = ("forward", "backward")
KINDS = ("all_gather", "reduce_scatter")


@dataclass(frozen=True)
class Hidden:
    """Hidden shares, 0 to 1, of the part of a collective that can be hidden: its time, or that of the products beside
    it if they are shorter. For a product in one slice they apply to all its collectives. For a product in several
    slices they apply to those of the first and last slice, which its own slices leave exposed; `left` is the share of
    the time of all its collectives that is exposed in addition.
    """

    all_gather: float = 0.0
    reduce_scatter: float = 0.0
    left: float = 0.0


@dataclass(frozen=True)
class Entry:
    """What one compiled training step hides, and the step.

    Attributes:
      forward, backward: shares in the forward and in the backward pass.
      target, mesh, model, layers, batch, seq, remat: the step.
      milliseconds: predicted from its schedule; exposed: of them, those in which a link works and the device does not.
      libtpu: version of the compiler.
    """

    forward: Hidden
    backward: Hidden
    target: str
    mesh: str
    model: str
    layers: int
    batch: int
    seq: int
    remat: str
    milliseconds: float
    exposed: float
    libtpu: str


def _entry(row: dict) -> Entry:
    return Entry(**{**row, **{phase: Hidden(**row[phase]) for phase in PHASES}})


@functools.cache
def overlap_table() -> Mapping[tuple[str, str], Entry]:
    """Entries by (generation, algorithm)."""
    document = tomllib.loads(TABLE.read_text())
    return MappingProxyType(
        {(chip, name): _entry(row) for chip, rows in document.items() for name, row in rows.items()}
    )


def hidden_shares(generation: str, algorithm: str) -> tuple[Hidden, Hidden] | None:
    """Shares in the (forward, backward) pass; None where no schedule has been read."""
    entry = overlap_table().get((generation, algorithm))
    return (entry.forward, entry.backward) if entry else None
