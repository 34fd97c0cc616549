"""bench=calibrate check=true: predicted and measured step times of ten small configurations.

Calibration and steps are measured in turn, in the same rounds, so that the same load of the machine affects both. With
calibration=FILE only the steps are measured.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

from mstrain.benchmarks.calibrate import FILE, calibration_of, compile_probes, start_mesh
from mstrain.benchmarks.config import BenchmarkConfig
from mstrain.benchmarks.probes import Probe, run_rounds
from mstrain.benchmarks.step_probe import step_probe
from mstrain.display.tables import make_table, write_csv
from mstrain.hardware.calibration import Calibration, load_calibration
from mstrain.mesh import parse_mesh
from mstrain.planner.trainer import spelled
from mstrain.tuning.calibrated import StepTerms, predict_step

TOLERANCE = 0.2
RUN_SECONDS = 400.0
# Seven algorithms at one shape, whose order is predicted too, then other shapes, depths and meshes.
CHECKED = (
    *((name, {"meshes": "2x4", "models": "tiny", "seq": 256}) for name in
      ("collective", "meshslice", "wang", "megatron", "fsdp", "summa", "gspmd")),
    ("collective", {"meshes": "2x2", "models": "tiny", "layers": 4, "seq": 128}),
    ("meshslice", {"meshes": "2x2x2", "models": "tiny", "layers": 6, "seq": 128}),
    ("collective", {"meshes": "2x4", "models": "small", "seq": 128}),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Checked:
    """One configuration with seconds of its step: CPU time over cores, and wall clock."""

    algorithm: str
    configuration: str
    predicted: StepTerms
    measured: float
    wall: float

    @property
    def ratio(self) -> float:
        return self.predicted.seconds / self.measured


def check(config: BenchmarkConfig, console: Console) -> int:
    """Prints and writes the table; the exit code is 1 when a ratio differs from 1 by more than `TOLERANCE`."""
    mesh = start_mesh(config)
    if jax.devices()[0].platform != "cpu":
        raise ValueError("check=true predicts steps of emulated CPU devices. Type JAX_PLATFORMS=cpu before python.")
    given = load_calibration(config.calibration) if config.calibration else None
    with console.status("Compiling") as status:
        texts, steps = {}, []
        for number, (algorithm, keys) in enumerate(CHECKED):
            status.update(f"Compiling {algorithm} {spelled(keys)}")
            probe, text = step_probe(config, algorithm, keys, ("step", number))
            steps.append(probe)
            texts[probe.key] = text
        probes, reference = ([], None) if given else compile_probes(mesh, config, math.inf, status.update)
        times = run_rounds(_spread(steps, probes), config.repeats, time.monotonic() + RUN_SECONDS, status.update)
    calibration = given or calibration_of(probes, reference, times, mesh, config)
    calibration.check_device((jax.devices()[0].device_kind,), config.calibration or FILE)
    folder = Path(config.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if not given:
        calibration.save(folder / FILE)
    rows = [
        Checked(
            algorithm,
            spelled(keys),
            predict_step(texts[step.key], _axes(keys), calibration),
            times.counted[step.key],
            times.wall[step.key],
        )  # fmt: skip
        for (algorithm, keys), step in zip(CHECKED, steps, strict=True)
    ]
    _write(rows, folder / "calibration_check.csv")
    console.print(_table(rows, calibration))
    for line in verdict(rows):
        console.print(line, soft_wrap=True)
    return 0 if all(abs(row.ratio - 1) <= TOLERANCE for row in rows) else 1


def _spread(steps: list[Probe], probes: list[Probe]) -> list[Probe]:
    """The steps, spread evenly between the probes, so that both run under the same load."""
    size = -(-len(probes) // len(steps))
    parts = [probes[size * number : size * (number + 1)] for number in range(len(steps))]
    return list(itertools.chain.from_iterable((step, *part) for step, part in zip(steps, parts, strict=True)))


def _axes(keys: dict) -> dict[str, int]:
    return parse_mesh(keys["meshes"]).axes


def verdict(rows: list[Checked]) -> list[str]:
    """Rows within the tolerance, pairs of algorithms in the predicted order, and the largest term of the worst row."""
    off = [row for row in rows if abs(row.ratio - 1) > TOLERANCE]
    lines = [f"{len(rows) - len(off)} of {len(rows)} predictions are within {TOLERANCE:.0%}."]
    pairs = [(a, b) for a, b in _comparable(rows) if max(a.measured, b.measured) > 1.1 * min(a.measured, b.measured)]
    kept = sum((a.measured < b.measured) == (a.predicted.seconds < b.predicted.seconds) for a, b in pairs)
    lines.append(f"Of {len(pairs)} pairs of algorithms that differ by more than 10 %, {kept} are predicted in order.")
    if off:
        worst = max(off, key=lambda row: abs(row.ratio - 1))
        terms = dataclasses.asdict(worst.predicted)
        name = max(terms, key=terms.__getitem__)
        lines.append(
            f"The worst is {worst.algorithm} {worst.configuration}; its largest predicted term is {name}, "
            f"{terms[name] / worst.predicted.seconds:.0%} of the step."
        )
    return lines


def _comparable(rows: list[Checked]) -> Iterator[tuple[Checked, Checked]]:
    return ((a, b) for a, b in itertools.combinations(rows, 2) if a.configuration == b.configuration)


def _table(rows: list[Checked], calibration: Calibration) -> Table:
    left, terms = ("algorithm", "configuration"), (field.name for field in dataclasses.fields(StepTerms))
    cells = []
    for row in rows:
        terms_ms = (f"{1e3 * value:.1f}" for value in dataclasses.asdict(row.predicted).values())
        cells.append((row.algorithm, row.configuration, f"{1e3 * row.predicted.seconds:.1f}",
                      f"{1e3 * row.measured:.1f}", f"{row.ratio:.2f}", *terms_ms, f"{1e3 * row.wall:.1f}"))  # fmt: skip
    columns = (*left, "predicted ms", "measured ms", "ratio", *terms, "wall ms")
    return make_table(f"Training steps, {calibration.source}", columns, cells, left, wrapped=left)


def _write(rows: list[Checked], path: Path) -> None:
    """In seconds."""
    write_csv([
        {"algorithm": row.algorithm, "configuration": row.configuration, "predicted_seconds": row.predicted.seconds,
         "measured_seconds": row.measured, "ratio": row.ratio,
         **{f"{name}_seconds": value for name, value in dataclasses.asdict(row.predicted).items()},
         "wall_seconds": row.wall}
        for row in rows
    ], path)  # fmt: skip
