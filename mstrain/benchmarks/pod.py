"""Predicted steps of a pod, below the table that a laptop measures: emulated devices say nothing about a TPU."""

import csv
from importlib.resources import files

from rich.table import Table

from mstrain.hardware import parse_target

NOTE = (
    "CPU devices overlap no communication with products, so the times above do not rank algorithms for TPUs. The "
    "rows here are a stored result. With libtpu (pip install libtpu), this command compiles a step again:\n"
    "python benchmark.py target={target} models={model} batch={batch} seq={seq} remat={remat} meshes={mesh} "
    'algorithms="{algorithms}"'
)


def read_pod() -> list[dict[str, str]]:
    """Rows of two batch sizes, the fastest first, with the columns of `docs/data/steps.csv`: texts."""
    with (files("mstrain.benchmarks") / "pod.csv").open() as file:
        return sorted(csv.DictReader(file), key=lambda row: (int(row["batch"]), float(row["ms"])))


def pod_table() -> Table:
    """The table for a terminal, with the command that compiles the first rows."""
    rows = read_pod()
    first = rows[0]
    devices = parse_target(first["target"]).devices
    title = (
        f"Predicted from schedules of libtpu {first['libtpu']}, not measured: {first['model']} on {first['target']} "
        f"({devices} devices), seq {first['seq']}"
    )
    same = [row["algorithm"] for row in rows if (row["mesh"], row["batch"]) == (first["mesh"], first["batch"])]
    table = Table(
        title=title, caption=NOTE.format(**first | {"algorithms": " ".join(same)}), title_justify="left",
        caption_justify="left", box=None, padding=(0, 1, 0, 0),
    )  # fmt: skip
    names = ("batch", "remat", "algorithm", "mesh", "shard")
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in ("ms", "low", "high", "MFU", "exposed", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        exposed = float(row["exposed_ms"]) / float(row["ms"])
        times = (f"{float(row[name]):,.0f}" for name in ("ms", "low_ms", "high_ms"))
        shares = (f"{row['mfu_percent']}%", f"{exposed:.1%}", f"{row['memory_gib']} GiB")
        table.add_row(*(row[name] for name in names), *times, *shares)
    return table
