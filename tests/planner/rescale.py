"""Fits the entries of mstrain/hardware/overlap.toml to all compiled steps.

    python -m tests.planner.rescale

Run it after tests.planner.overlap or a change of the cost model. An entry has the hidden fractions of one step. With
these, the predicted times of other steps of its algorithm and TPU generation are up to 14 % too short, because exposed
time depends on more than the terms of the cost model. The command therefore fits a factor on the exposed fractions of
an entry and, for algorithms with slices, the exposed fraction of collectives of slices other than the first and the
last. The fit minimizes the mean square of (predicted - compiled exposed time) / (time of the step) over all steps in
docs/data/steps.csv, docs/data/slices.csv (the same steps in other slice counts), and those of FSDP in
docs/data/expert_steps.csv. An entry stays as it is where the fit reduces this error by less than `GAIN`.
"""

import dataclasses
import itertools
from collections.abc import Callable
from unittest.mock import patch

from mstrain.gemm import find_algorithm
from mstrain.hardware import overlap
from mstrain.hardware.clusters import find_pod
from mstrain.hardware.overlap import KINDS, Entry, Hidden, overlap_table
from mstrain.planner import layer
from mstrain.planner.cost import Costed
from tests.docs import expert_steps
from tests.docs.rows import read_rows
from tests.docs.steps import CURRENT, SLICES
from tests.planner.overlap import write_entry
from tests.planner.steps import compared, cost_of, exposed_seconds, root_mean_square

Row = dict[str, str]
Cost = Callable[[Row], Costed | None]
FACTORS = [n / 20 for n in range(8, 61)]
SLICED_FACTORS, LEFT = [n / 10 for n in range(1, 16)], range(16)  # LEFT: exposed percent of the collectives of slices
GAIN = 0.002  # of the time of a step


def scaled(entry: Entry, factor: float) -> Entry:
    """The entry with its exposed fractions multiplied by `factor`."""

    def each(part: Hidden) -> Hidden:
        shares = (1 - factor * (1 - getattr(part, kind)) for kind in KINDS)
        return Hidden(*(round(min(1.0, max(0.0, share)), 3) for share in shares))

    return dataclasses.replace(entry, forward=each(entry.forward), backward=each(entry.backward))


def leaving(entry: Entry, left: float) -> Entry:
    """The entry with the exposed fraction `left` of collectives of slices."""
    forward, backward = (dataclasses.replace(part, left=left) for part in (entry.forward, entry.backward))
    return dataclasses.replace(entry, forward=forward, backward=backward)


def candidates(algorithm: str, entry: Entry) -> dict[str, Entry]:
    """The candidates of the fit by description; the first one is the entry before the fit."""
    found = {"as before": entry}
    if find_algorithm(algorithm).sliced:
        for factor, percent in itertools.product(SLICED_FACTORS, LEFT):
            text = f"exposed fractions times {factor:.1f}, {percent} % of the collectives of slices exposed"
            found[text] = leaving(scaled(entry, factor), percent / 100)
        return found
    return found | {f"exposed fractions times {factor:.2f}": scaled(entry, factor) for factor in FACTORS}


def read() -> dict[tuple[str, str], list[tuple[Row, Cost]]]:
    """(row of a step, function that costs it) by (TPU generation, algorithm)."""
    found: dict[tuple[str, str], list[tuple[Row, Cost]]] = {}
    experts = ((row, expert_steps.cost_of) for row in expert_steps.read() if row["algorithm"] == "fsdp")
    steps = [*(row for row, _ in compared()), *(row for row in read_rows(SLICES) if row["program"] == CURRENT)]
    for row, cost in [*((row, cost_of) for row in steps), *experts]:
        key = find_pod(row["target"]).chip.name, row["algorithm"]
        found.setdefault(key, []).append((row, cost))
    return found


def error(key: tuple[str, str], entry: Entry, steps: list[tuple[Row, Cost]]) -> float:
    """RMS of (predicted - compiled exposed time) / (time of the step), if `entry` is the entry of `key`."""
    with patch.object(overlap, "overlap_table", lambda: {**overlap_table(), key: entry}):
        layer._work.cache_clear()  # its key does not include overlap.toml
        costs = [(row, costed) for row, cost in steps if (costed := cost(row))]
    layer._work.cache_clear()
    return root_mean_square(
        [(1e3 * exposed_seconds(costed) - float(row["exposed_ms"])) / float(row["ms"]) for row, costed in costs]
    )


def main() -> None:
    steps = read()
    for key, entry in overlap_table().items():
        found = candidates(key[1], entry)
        errors = {text: error(key, each, steps[key]) for text, each in found.items()}
        best, first = min(errors, key=errors.__getitem__), next(iter(errors))
        best = best if errors[best] < errors[first] - GAIN else first
        print(f"{'.'.join(key)}: {len(steps[key])} steps, {best},", end=" ")
        print(f"RMS error of exposed time / step {100 * errors[first]:.1f} % before, {100 * errors[best]:.1f} % after")
        write_entry(key[1], found[best])


if __name__ == "__main__":
    main()
