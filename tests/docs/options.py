"""Prints the table of compiler options of docs/benchmarks.md, from docs/data/options.csv.

Command: python -m tests.docs.options
"""

import itertools

from tests.compiler.options import SEARCH, TABLE
from tests.docs.rows import read_rows
from tests.docs.steps import NAMES

HEAD = "| target | algorithm | program | scoped VMEM, KiB | ms (low, high) | exposed ms | further options: time |"


def line(search: tuple[str, ...], rows: list[dict[str, str]]) -> str:
    """One search: its first row, and the change of the time by every further group, added to the groups kept so far."""
    target, algorithm, program, vmem = search
    kept, *others = rows
    digits = 1 if float(kept["seconds"]) < 0.2 else 0
    ms, low, high = (f"{1e3 * float(kept[key]):.{digits}f}" for key in ("seconds", "low", "high"))
    first = f"{ms} ({low}, {high})" + (f" with {kept['groups']}" if kept["groups"] else "")
    exposed, found = f"{1e3 * float(kept['exposed']):.{digits}f}", []
    for row in others:
        *_, group = row["groups"].split(" + ")
        if not row["seconds"]:
            found.append(f"{group}: not compiled")
            continue
        change = 100 * (float(row["seconds"]) / float(kept["seconds"]) - 1)
        text = f"{change:+.1f} %" if abs(change) >= 0.05 else "equal"
        better = row["kept"] == "true"
        found.append(f"**{group}: {text}**" if better else f"{group}: {text}")
        kept = row if better else kept
    return f"| `{target}` | {NAMES[algorithm]} | {program} | {vmem} | {first} | {exposed} | {'; '.join(found)} |"


def table() -> str:
    """The table, one line per search."""
    searches = itertools.groupby(read_rows(TABLE), lambda row: tuple(row[key] for key in SEARCH))
    return "\n".join(
        [HEAD, "|---|---|---|---|---|---|---|", *(line(search, list(group)) for search, group in searches)]
    )


if __name__ == "__main__":
    print(table())
