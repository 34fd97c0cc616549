"""Hidden fractions of collectives in compiled training steps (overlap.toml), by TPU generation and algorithm."""

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
    """Fractions, 0 to 1, of the hideable time of a collective that is hidden, by kind of collective.

    The hideable time is the time of the collective, or that of the overlapping products if it is shorter. For a product
    in one slice, the fractions apply to all its collectives. For a product in several slices, they apply to the
    collectives of the first and last slice, which its own slices cannot hide; `left` is the fraction of the time of all
    its collectives that is exposed in addition.
    """

    all_gather: float = 0.0
    reduce_scatter: float = 0.0
    left: float = 0.0


@dataclass(frozen=True)
class Entry:
    """The hidden fractions of one compiled training step, and the step.

    Attributes:
      forward, backward: fractions in the forward and in the backward pass.
      target, mesh, model, layers, batch, seq, remat: the configuration of the step.
      milliseconds: step time predicted from its compiled schedule.
      exposed: milliseconds of it in which a link is busy and the device waits.
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
    """Hidden fractions in the (forward, backward) pass; None if the table has no such step."""
    entry = overlap_table().get((generation, algorithm))
    return (entry.forward, entry.backward) if entry else None
