"""Link and compute constants of the cost model, from a shipped file, a user's file, or the table of chips."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from mstrain.hardware.chips import Chip
from mstrain.hardware.gemm_times import GemmTime
from mstrain.hardware.link import Link
from mstrain.hardware.tpu_slices import TpuSlice
from mstrain.json_files import parse_json, write_json

FOLDER = Path(__file__).parent / "constants_files"
COLLECTIVES = ("all_gather", "reduce_scatter", "permute")
GEMM_FRACTION = 249 / 272  # fraction of the peak that the MeshSlice authors fitted to their simulated TPU v4


@dataclass(frozen=True)
class AxisLinks:
    """The link of each kind of collective along one mesh axis."""

    all_gather: Link
    reduce_scatter: Link
    permute: Link


@dataclass(frozen=True)
class Overlap:
    """How the times of two collectives combine: weights of (the longer, the shorter) in their sum.

    Attributes:
      gathers: weights of the first two all_gathers of OS.
      chain: weights of the first all_gather and the last reduce_scatter of LS and RS.
      steady: weights of the two collectives of a slice.
      hides: whether the collectives of a slice overlap with a product; otherwise they precede it.
    """

    gathers: tuple[float, float]
    chain: tuple[float, float]
    steady: tuple[float, float]
    hides: bool = True


OVERLAPS = {
    "max": Overlap((1, 0), (1, 1), (1, 0)),  # MeshSlice paper section 3.2.2
    "average": Overlap((0.5, 0.5), (0.5, 0.5), (0.5, 0.5)),  # refit of the reference code to its simulator
    "none": Overlap((1, 1), (1, 1), (1, 1), hides=False),  # every collective blocks
}


@dataclass(frozen=True)
class Constants:
    """The constants of one machine in the cost model.

    Attributes:
      flops: GeMM rate of one device in FLOP/s.
      row, col: links along the two mesh axes.
      overlap: a key of `OVERLAPS`.
      hbm_bandwidth: bytes/s of one device's memory, which limits the accumulation of slices; None for no limit.
      shaped: whether the rate of a product depends on its shape (table of efficiencies); `flops` is for large products.
      gemm: measured times of products by shape, from a calibration; empty if not measured.
      ring: links of both axes together, for algorithms on one ring of all devices; None for the links of one axis.

    Raises ValueError for an unknown overlap, and unless `flops` and `hbm_bandwidth` are positive.
    """

    name: str
    source: str
    flops: float
    row: AxisLinks
    col: AxisLinks
    overlap: str = "max"
    hbm_bandwidth: float | None = None
    shaped: bool = False
    gemm: tuple[GemmTime, ...] = ()
    ring: AxisLinks | None = None

    def __post_init__(self):
        if self.overlap not in OVERLAPS:
            raise ValueError(f"{self.name}: overlap {self.overlap!r} is unknown; use {' | '.join(OVERLAPS)}")
        if self.flops <= 0:
            raise ValueError(f"{self.name}: flops must be positive (FLOP/s of one device), not {self.flops}")
        if self.hbm_bandwidth is not None and not self.hbm_bandwidth > 0:
            raise ValueError(f"{self.name}: hbm_bandwidth must be positive (bytes/s) or null, not {self.hbm_bandwidth}")

    def along(self, rows: int, cols: int, turned: bool) -> "Constants":
        """The constants with the links of a product on a `rows` x `cols` grid.

        With `turned`, the rows of the grid are the columns of the mesh. A grid of one row or column uses `ring`.
        """
        if self.ring and 1 in (rows, cols):
            return dataclasses.replace(self, row=self.ring, col=self.ring)
        return dataclasses.replace(self, row=self.col, col=self.row) if turned else self

    def save(self, path: str | Path) -> None:
        """Writes the JSON file that `load_constants` reads."""
        write_json(dataclasses.asdict(self), path)


def _axis(entry: dict) -> AxisLinks:
    return AxisLinks(**{name: Link(**{k: float(v) for k, v in entry[name].items()}) for name in COLLECTIVES})


def load_constants(name_or_path: str | Path) -> Constants:
    """Constants from a shipped file such as "tpu_v4_reference", or from a JSON file with the same keys.

    Raises ValueError if the file is missing or invalid.
    """
    shipped = {path.stem: path for path in sorted(FOLDER.glob("*.json"))}
    path = shipped.get(str(name_or_path), Path(name_or_path))
    if not path.is_file():
        raise ValueError(f"No constants {str(name_or_path)!r}. Type a JSON file or one of {', '.join(shipped)}.")
    try:
        entry = parse_json(path.read_text())
        memory = entry.get("hbm_bandwidth")
        return Constants(
            entry["name"],
            entry["source"],
            float(entry["flops"]),
            _axis(entry["row"]),
            _axis(entry["col"]),
            entry["overlap"],
            None if memory is None else float(memory),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{path}: not a constants file ({error!r}); compare it with {FOLDER / 'tpu_v4_reference.json'}"
        ) from None


def constants_for(target: Chip | TpuSlice, dtype: str = "bf16") -> Constants:
    """Constants derived from the table of chips; for "cpu" the shipped `cpu_emulated`.

    A collective along a TPU axis uses one link, or two if the `TpuSlice` has closed rings. On GPUs, the row and col
    axes use half of the ports each. GeMMs run at GEMM_FRACTION of the peak. Raises ValueError if the table lacks a
    number.
    """
    chip = target.chip if isinstance(target, TpuSlice) else target
    if chip.platform == "cpu":
        return load_constants("cpu_emulated")
    needed = {
        "peak": chip.peak(dtype),
        "ici_links": chip.ici_links,
        "ici_bandwidth": chip.ici_bandwidth,
        "launch_all_gather": chip.launch_all_gather,
        "sync": chip.sync,
    }
    missing = [name for name, value in needed.items() if value is None]
    if missing:
        raise ValueError(
            f"the table of chips has no {', '.join(missing)} for {chip.name}: "
            f"measure with bench=collectives and pass its file"
        )
    if chip.torus_rank:
        links = 2 if isinstance(target, TpuSlice) and target.wraps else 1
    else:
        links = chip.number("ici_links") / 2
    bandwidth = links * chip.number("ici_bandwidth")
    axis = AxisLinks(*(Link(chip.number(f"launch_{name}"), chip.number("sync"), bandwidth) for name in COLLECTIVES))
    source = f"derived from the table of chips: {links:g} link(s) per axis, {GEMM_FRACTION:.3f} of the peak"
    return Constants(
        target.name, source, chip.known_peak(dtype) * GEMM_FRACTION, axis, axis, chip.overlap, chip.hbm_bandwidth
    )
