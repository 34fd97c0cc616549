"""What the autotuner returns."""

from dataclasses import dataclass

from mstrain.hardware.constants import Constants
from mstrain.parallel.tune import Choice

TOO_FEW = "slices too few: fill and drain exposed"


@dataclass(frozen=True)
class AxisPair:
    """A quantity per mesh axis."""

    row: float
    col: float


@dataclass(frozen=True)
class Candidate:
    """One mesh with one family of dataflows ("os/ls", "os", "ls", "rs", "rule"), at its best slice counts.

    Seconds of one device in one step, of these projections only. `traffic_bytes` and `traffic` are what it
    receives per axis, `latency` its launches and syncs, `pipeline` the first slices and last scatters.
    """

    rows: int
    cols: int
    family: str
    choices: tuple[Choice, ...]
    traffic_bytes: AxisPair
    traffic: AxisPair
    latency: AxisPair
    pipeline: float
    why: str = ""

    @property
    def seconds(self) -> float:
        return sum(choice.seconds for choice in self.choices)

    @property
    def compute(self) -> float:
        return sum(choice.cost.compute for choice in self.choices)

    @property
    def communication(self) -> float:
        return sum(choice.cost.communication for choice in self.choices)

    @property
    def exposed(self) -> float:
        return self.seconds - self.compute


@dataclass(frozen=True)
class Tuning:
    """The winner, every candidate from best to worst, and (rows, cols, reason) of shapes that do not fit."""

    best: Candidate
    candidates: tuple[Candidate, ...]
    rejected: tuple[tuple[int, int, str], ...]
    constants: Constants
    tokens: int

    @property
    def mesh(self) -> tuple[int, int]:
        return self.best.rows, self.best.cols

    @property
    def dataflows(self) -> dict[str, str]:
        return {choice.name: choice.dataflow for choice in self.best.choices}

    @property
    def slices(self) -> dict[str, int]:
        return {choice.name: choice.slices for choice in self.best.choices}


def why_slower(loser: Candidate, best: Candidate) -> str:
    """What made the loser slower: the part of its communication that grew most over the best one's."""
    same_mesh = (loser.rows, loser.cols) == (best.rows, best.cols)
    place = f"{loser.family} instead of {best.family}: " if same_mesh else ""
    growth = {
        (kind, axis): getattr(getattr(loser, kind), axis) - getattr(getattr(best, kind), axis)
        for kind in ("traffic", "latency")
        for axis in ("row", "col")
    }
    growth["pipeline", ""] = loser.pipeline - best.pipeline
    kind, axis = max(growth, key=growth.get)
    if growth[kind, axis] <= 0:
        return place + "no more to send, but less of it hidden"
    if kind == "latency":
        return place + f"latency of the {getattr(loser, axis + 's')}-device {axis} axis"
    if kind == "pipeline":
        return place + TOO_FEW
    old, new = getattr(best.traffic, axis), getattr(loser.traffic, axis)
    return place + (f"{axis} traffic {new / old:.1f}x" if old else f"{axis} traffic where the best has none")
