"""Predicted steps of a pod, printed below the table that a laptop measures, because emulated devices do not predict a
TPU."""

import csv
import itertools
from importlib.resources import files

from rich.console import Group

from mstrain.benchmarks.table import Report, Row, to_table
from mstrain.hardware import parse_target
from mstrain.program.memory import GIB

NOTE = (
    "CPU devices overlap no communication with products, so the measured times do not rank algorithms for TPUs. The "
    "predicted rows are a stored result. With libtpu (pip install libtpu), this command compiles a step again:\n"
    "python benchmark.py target={target} models={model} batch={batch} seq={seq} remat={remat} meshes={mesh} "
    'algorithms="{algorithms}"'
)


def read_pod() -> list[dict[str, str]]:
    """Rows of all batch sizes, the fastest first, with the columns of `docs/data/steps.csv`: texts."""
    with (files("mstrain.benchmarks") / "pod.csv").open() as file:
        return sorted(csv.DictReader(file), key=lambda row: (int(row["batch"]), float(row["ms"])))


def pod_table() -> Group:
    """The tables for a terminal, one for each batch size, with the command that compiles the first rows."""
    steps = [[*rows] for _, rows in itertools.groupby(read_pod(), lambda row: (row["batch"], row["remat"]))]
    first = steps[0][0]
    same = [row["algorithm"] for row in steps[0] if row["mesh"] == first["mesh"]]
    tables = [to_table(_report(rows)) for rows in steps]
    return Group(*tables, NOTE.format(**first | {"algorithms": " ".join(same)}))


def _report(rows: list[dict[str, str]]) -> Report:
    """The rows of one step."""
    step = rows[0]
    source = (
        f"Predicted from schedules of libtpu {step['libtpu']}, not measured: {step['target']}, batch {step['batch']}, "
        f"seq {step['seq']}, remat {step['remat']}"
    )
    peak = parse_target(step["target"]).chip.peak("bfloat16")
    return Report("predicted", source, "step", "bfloat16", peak, [_row(row, peak) for row in rows])


def _row(row: dict[str, str], peak: float | None) -> Row:
    seconds, low, high, exposed = (float(row[name]) / 1e3 for name in ("ms", "low_ms", "high_ms", "exposed_ms"))
    share, batch = float(row["mfu_percent"]) / 100, int(row["batch"])
    plan = row["plan"] if row["shard"] == "none" else f"{row['plan']} shard={row['shard']}"
    return Row(
        row["model"], row["mesh"], row["algorithm"], "step", plan, batch, seconds, batch * int(row["seq"]) / seconds,
        share * peak if peak else None, share, exposed, round(float(row["memory_gib"]) * GIB),
        float(row["hidden_percent"]) / 100, low, high,
    )  # fmt: skip
