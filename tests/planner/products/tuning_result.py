"""Result of the autotuner of `tests.planner.products.tuner`."""

from dataclasses import dataclass

from mstrain.hardware.constants import Constants
from mstrain.parallel.tune import Choice

TOO_FEW = "too few slices: first and last one exposed"


@dataclass(frozen=True)
class AxisPair:
    """A quantity per mesh axis."""

    row: float
    col: float


@dataclass(frozen=True)
class Candidate:
    """One mesh with one family of dataflows ("os/ls", "os", "ls", "rs", "rule") and its best slice counts.

    Times are seconds of one device in one step, for the projections of the block only.

    Attributes:
      traffic_bytes, traffic: bytes that a device receives along each axis, and their time.
      latency: time of launches and syncs along each axis.
      pipeline: time of the first all_gathers and last reduce_scatters, which cannot overlap.
      why: the reason why it is slower than the best candidate.
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
    """The best candidate, all candidates in order of time, and (rows, cols, reason) of shapes that do not fit."""

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
    """Why `loser` is slower: the part of its communication that exceeds that of `best` most."""
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
        return place + "the same communication, of which less is hidden"
    if kind == "latency":
        return place + f"latency of the {getattr(loser, axis + 's')}-device {axis} axis"
    if kind == "pipeline":
        return place + TOO_FEW
    old, new = getattr(best.traffic, axis), getattr(loser.traffic, axis)
    return place + (f"{axis} traffic {new / old:.1f}x" if old else f"{axis} traffic where the best has none")
