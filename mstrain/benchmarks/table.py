"""The rows of a comparison as table, CSV, JSON and plot."""

import csv
import dataclasses
import io
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rich.table import Table

from mstrain.benchmarks.cases import Case
from mstrain.benchmarks.work import Work
from mstrain.display.tables import make_table
from mstrain.hardware import mfu
from mstrain.json_files import replace_text
from mstrain.program.memory import GIB

FORMULA = "MFU = model FLOPs (no recomputation) / (seconds x devices x peak)"


@dataclasses.dataclass(frozen=True)
class Row:
    """One row, in SI units; None for unknown values.

    Per device: `flops_per_second`, `memory` (bytes), `exposed` (seconds of communication without compute), `hidden`
    (share of the collectives' time with compute), `low` and `high` (seconds with unmeasured constants at the ends of
    their ranges; `unknown` is the constant that alone changes the time most). `compile_seconds` is the first step of a
    peer. `problem` is the reason for a missing result, or for a program that does not fit.
    """

    model: str
    mesh: str
    algorithm: str
    part: str
    plan: str = ""
    batch: int | None = None
    seconds: float | None = None
    tokens_per_second: float | None = None
    flops_per_second: float | None = None
    mfu: float | None = None
    exposed: float | None = None
    memory: int | None = None
    hidden: float | None = None
    low: float | None = None
    high: float | None = None
    unknown: str = ""
    compile_seconds: float | None = None
    problem: str = ""


def make_row(case: Case, work: Work, seconds: float, peak: float | None, **measured) -> Row:
    """The row of a program that took `seconds`; raises ValueError for an MFU above 1."""
    devices = case.mesh.devices
    return Row(
        case.model.name, str(case.mesh), case.algorithm, work.part, work.plan, case.batch, seconds,
        tokens_per_second=work.tokens / seconds, flops_per_second=work.flops / seconds / devices,
        mfu=mfu(work.flops, seconds, devices, peak), **measured,
    )  # fmt: skip


def failed(case: Case, part: str, error: Exception) -> Row:
    """The row of a case that has no result."""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return Row(case.model.name, str(case.mesh), case.algorithm, part, batch=case.batch, problem=reason)


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of a comparison.

    `kind` is `measured` or `predicted`. `source` is the devices or the compiled programs, for the title of the table.
    `unfinished` counts missing rows. `beyond` is measured over compiled seconds of published steps; None if unknown.
    """

    kind: str
    source: str
    bench: str
    dtype: str
    peak: float | None
    rows: list[Row] = dataclasses.field(default_factory=list)
    unfinished: int = 0
    beyond: float | None = None

    @property
    def basis(self) -> str:
        """The formula and the peak of MFU, and the ratio of measured to predicted times of published steps."""
        peak = f"{self.peak / 1e12:g} TFLOP/s ({self.dtype})" if self.peak else "unknown, so MFU is n/a"
        basis = f"{FORMULA}; peak of a device: {peak}"
        return f"{basis}\nMeasured steps took up to {self.beyond:.2f} times their schedules" if self.beyond else basis


def to_table(report: Report) -> Table:
    """The table for a terminal. Values common to all rows are in the title; reasons for missing results are below."""
    values = {name: {getattr(row, name) for row in report.rows} for name in ("model", "mesh", "part")}
    names = [name for name in values if len(values[name]) > 1]
    same = [f"{name} {getattr(report.rows[0], name)}" for name in ("model", "mesh") if name not in names]
    title = f"{report.source}: bench={report.bench}" + "".join(f", {text}" for text in same)
    notes = [report.basis]
    for row in report.rows:
        if row.problem:
            result = "" if row.seconds else " has no result"
            notes.append(f"{row.algorithm} on {row.mesh}{result}: {row.problem}")
    exposed = ["exposed", "hidden"] if report.kind == "predicted" else []
    bounds = ["low", "high", "unknown"] if report.kind == "predicted" else []
    compiling = ["compile s"] if any(row.compile_seconds for row in report.rows) else []
    numbers = ("ms", *bounds, "tokens/s", "TFLOP/s", "MFU", *exposed, "memory", *compiling)
    left, rows = (*names, "algorithm", "plan"), []
    for row in report.rows:
        cells = _cells(row)
        texts = [getattr(row, name) for name in left[:-1]]
        plan = "no result" if row.problem and not row.seconds else row.plan
        rows.append((*texts, plan, *(cells[name] for name in numbers)))
    return make_table(title, (*left, *numbers), rows, left, "\n".join(notes), wrapped=("plan",))


def _cells(row: Row) -> dict[str, str]:
    def cell(value: float | None, form: str, scale: float = 1.0) -> str:
        return "n/a" if value is None else format(scale * value, form)

    share = None if row.exposed is None or row.seconds is None else row.exposed / row.seconds
    large = (row.memory or 0) >= GIB / 10
    return {
        "ms": cell(row.seconds, ",.2f", 1e3),
        "low": cell(row.low, ",.2f", 1e3),
        "high": cell(row.high, ",.2f", 1e3),
        "unknown": row.unknown or "n/a",
        "tokens/s": cell(row.tokens_per_second, ",.0f"),
        "TFLOP/s": cell(row.flops_per_second, ".3g", 1e-12),
        "MFU": cell(row.mfu, ".1%"),
        "exposed": cell(share, ".1%"),
        "hidden": cell(row.hidden, ".0%"),
        "compile s": cell(row.compile_seconds, ".0f"),
        "memory": cell(row.memory, ".2f" if large else ".1f", 1 / GIB if large else 2**-20)
        + ("" if row.memory is None else " GiB" if large else " MiB"),
    }


def summarize(row: Row) -> str:
    """A row in one line for progress: `meshslice on row4-col8, step: 512.3 ms, MFU 45.6%`."""
    cells = _cells(row)
    shown = {"ms": "{} ms", "MFU": "MFU {}", "exposed": "exposed {}", "hidden": "hidden {}", "memory": "{}"}
    results = [form.format(cells[name]) for name, form in shown.items() if cells[name] != "n/a"]
    text = ", ".join([*results, row.problem] if row.problem else results)
    return f"{row.model} {row.algorithm} on {row.mesh}, {row.part}: {text}"


def to_csv(report: Report) -> str:
    """CSV with one line per row in SI units; the first column is `measured` or `predicted`."""
    text = io.StringIO()
    columns = ["kind", *(field.name for field in dataclasses.fields(Row))]
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({"kind": report.kind, **dataclasses.asdict(row)} for row in report.rows)
    return text.getvalue()


def to_json(report: Report) -> str:
    """JSON of the whole report in SI units."""
    return json.dumps({**dataclasses.asdict(report), "basis": report.basis}, indent=2) + "\n"


def from_json(text: str) -> Report:
    """The report that `to_json` wrote."""
    values = json.loads(text)
    values.pop("basis")
    return Report(**{**values, "rows": [Row(**row) for row in values["rows"]]})


def plot(report: Report, path: str | Path) -> None:
    """Plots time per row with exposed communication in a second color, labeled with MFU or TFLOP/s."""
    rows = [row for row in report.rows if row.seconds]
    figure, axes = plt.subplots(figsize=(9, 1.5 + 0.32 * len(rows)), layout="constrained")
    labels = [" ".join((row.model, row.mesh, row.algorithm, row.part)) for row in rows]
    exposed = [1e3 * (row.exposed or 0.0) for row in rows]
    rest = [1e3 * (row.seconds or 0.0) - e for row, e in zip(rows, exposed, strict=True)]
    places = range(len(rows))
    axes.barh(places, rest, color="tab:blue", label="computing")
    bars = axes.barh(places, exposed, left=rest, color="tab:orange", label="exposed communication")
    cells = [_cells(row) for row in rows]
    marks = [c["MFU"] if c["MFU"] != "n/a" else f"{c['TFLOP/s']} TFLOP/s" for c in cells]
    axes.bar_label(bars, marks, padding=3, fontsize=8)
    axes.set_yticks(list(places), labels, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel("ms; beside the bars MFU, or TFLOP/s per device where the peak is unknown")
    axes.set_title(f"{report.source}: bench={report.bench}", fontsize=9, wrap=True)
    if report.kind == "predicted":
        figure.legend(loc="outside lower right", ncols=2, fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def write_numbers(report: Report, folder: Path) -> list[Path]:
    """Writes benchmark.csv and .json to `folder`, each by an atomic rename; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {folder / "benchmark.csv": to_csv(report), folder / "benchmark.json": to_json(report)}
    for path, text in texts.items():
        replace_text(path, text)
    return [*texts]


def write(report: Report, folder: Path) -> list[Path]:
    """Writes benchmark.csv, .json and .png to `folder`; returns their paths."""
    paths = write_numbers(report, folder)
    plot(report, folder / "benchmark.png")
    return [*paths, folder / "benchmark.png"]
