"""Prints the table of compiled steps of docs/benchmarks.md, from docs/data/steps.csv.

Command: python -m tests.docs.steps
"""

from pathlib import Path

from tests.docs.rows import read_rows

ROOT = Path(__file__).resolve().parents[2]
STEPS = ROOT / "docs" / "data" / "steps.csv"
SLICES = ROOT / "docs" / "data" / "slices.csv"  # the same columns: steps of STEPS in other slice counts
POD = ROOT / "mstrain" / "benchmarks" / "pod.csv"  # the rows that a laptop shows
STEP = ("target", "model", "layers", "batch", "seq", "remat")  # columns that the rows of one step share
NAMES = {"meshslice": "MeshSlice", "collective": "Collective", "wang": "Wang", "fsdp": "FSDP", "megatron": "Megatron",
         "cannon": "Cannon", "summa": "SUMMA", "gspmd": "GSPMD"}  # fmt: skip
WHOLE = {"gpt3_175b": "96", "megatron_nlg_530b": "105", "llama2_70b": "80", "llama3_70b": "80"}  # layers
CURRENT = "today"  # column `program` of steps compiled with the current code; `earlier`: with an earlier version
HEAD = "| step | algorithm, mesh | ms (low, high) | MFU | exposed, ms | memory, GiB | time over MeshSlice (low, high) |"


def read_steps() -> list[dict[str, str]]:
    return read_rows(STEPS)


def pod_rows() -> list[dict[str, str]]:
    """The rows of `POD`: GPT-3 175B on v5p-512, compiled with the current code."""
    wanted = ("v5p-512", "gpt3_175b", CURRENT)
    return [row for row in read_steps() if (row["target"], row["model"], row["program"]) == wanted]


def groups(rows: list[dict[str, str]]) -> dict[tuple, list[dict[str, str]]]:
    """Rows by step, in the order of the file; the rows of a step in order of time."""
    found: dict[tuple, list] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in STEP), []).append(row)
    return {step: sorted(group, key=lambda row: float(row["ms"])) for step, group in found.items()}


def name_of(row: dict[str, str]) -> str:
    """`FSDP x TP, prefetched 64x1x4`, `MeshSlice 4x8`, or `MeshSlice 4x16x4, ZeRO 3`."""
    sharded = row["shard"] == "parameters"
    if row["algorithm"] == "megatron":
        return f"{'FSDP x TP, prefetched' if sharded else NAMES['megatron']} {row['mesh']}"
    return f"{NAMES[row['algorithm']]} {row['mesh']}{', ZeRO 3' if sharded else ''}"


def step_name(step: tuple) -> str:
    target, model, layers, batch, seq, remat = step
    words = [model, *([f"layers={layers}"] if layers != WHOLE[model] else []), f"batch={batch}", f"seq={seq}"]
    return f"`{target}`, `{' '.join([*words, *([f'remat={remat}'] if remat != 'none' else [])])}`"


def line(row: dict[str, str], ours: dict[str, str], first: bool, step: tuple) -> str:
    name, ms = name_of(row) + " †" * (row["program"] != CURRENT), f"{float(row['ms']):.0f}"
    if first and row["algorithm"] == "meshslice":
        name, ms = name.replace("MeshSlice", "**MeshSlice**"), f"**{ms}**"
    low, high = (f"{float(row[key]):.0f}" for key in ("low_ms", "high_ms"))
    more = [f"{100 * (float(row[key]) / float(ours[key]) - 1):+.1f}" for key in ("ms", "low_ms", "high_ms")]
    over = "" if row is ours else f"{more[0]} % ({more[1]}, {more[2]})"
    cells = (f"{ms} ({low}, {high})", f"{float(row['mfu_percent']):.1f} %", f"{float(row['exposed_ms']):.0f}",
             row["memory_gib"], over)  # fmt: skip
    return f"| {step_name(step) if first else ''} | {name} | {' | '.join(cells)} |"


def table() -> str:
    """The table, of steps with a row of MeshSlice. Other steps are published runs, which have a table of their own."""
    lines = [HEAD, "|---|---|---|---|---|---|---|"]
    for step, group in groups(read_steps()).items():
        ours = next((row for row in group if row["algorithm"] == "meshslice"), None)
        if ours:
            lines += [line(row, ours, row is group[0], step) for row in group]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
