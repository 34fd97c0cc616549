"""Scales the table of overlap to all compiled steps, after tests.planner.overlap or a change of the cost model.

    python -m tests.planner.rescale

A schedule tells which kinds of collectives a step hides, and in which pass. How much is left depends on more than the
cost model knows: by the shares of one step, others of its algorithm and generation were priced up to 14 % too short.
So what an entry leaves exposed is scaled by one factor; an entry of an algorithm in slices takes the share of their
collectives that is exposed beside its first and last slice. Both are chosen so that the seconds that the cost model
exposes of all steps in docs/data/steps.csv, and of FSDP in docs/data/expert_steps.csv, are the nearest, by the mean
square of the difference over the time of the step.
"""

import dataclasses
from collections.abc import Callable
from unittest.mock import patch

from mstrain.gemm import find_algorithm
from mstrain.hardware import overlap
from mstrain.hardware.clusters import find_pod
from mstrain.hardware.overlap import KINDS, Entry, Hidden, overlap_table
from mstrain.planner import layer
from mstrain.planner.cost import Costed
from tests.docs import expert_steps
from tests.planner.overlap import write_entry
from tests.planner.steps import compared, cost_of, exposed_seconds, root_mean_square

Row = dict[str, str]
Cost = Callable[[Row], Costed | None]
FACTORS = [n / 20 for n in range(8, 61)]
LEFT = range(31)  # percent


def scaled(entry: Entry, factor: float) -> Entry:
    """What the entry leaves exposed times `factor`."""

    def each(part: Hidden) -> Hidden:
        shares = (1 - factor * (1 - getattr(part, kind)) for kind in KINDS)
        return Hidden(*(round(min(1.0, max(0.0, share)), 3) for share in shares))

    return dataclasses.replace(entry, forward=each(entry.forward), backward=each(entry.backward))


def leaving(entry: Entry, left: float) -> Entry:
    """The entry with this share of the collectives of products in slices exposed."""
    forward, backward = (dataclasses.replace(part, left=left) for part in (entry.forward, entry.backward))
    return dataclasses.replace(entry, forward=forward, backward=backward)


def candidates(algorithm: str, entry: Entry) -> dict[str, Entry]:
    """What the entry may become; first as it is without what slices leave."""
    if find_algorithm(algorithm).sliced:
        return {
            f"{percent} % of the collectives of slices is exposed": leaving(entry, percent / 100) for percent in LEFT
        }
    factors = sorted(FACTORS, key=lambda factor: abs(factor - 1))
    return {f"what is exposed times {factor:.2f}": scaled(entry, factor) for factor in factors}


def read() -> dict[tuple[str, str], list[tuple[Row, Cost]]]:
    """Steps, and how each is priced, by (generation, algorithm)."""
    found: dict[tuple[str, str], list[tuple[Row, Cost]]] = {}
    experts = ((row, expert_steps.cost_of) for row in expert_steps.read() if row["algorithm"] == "fsdp")
    for row, cost in [*((row, cost_of) for row, _ in compared()), *experts]:
        key = find_pod(row["target"]).chip.name, row["algorithm"]
        found.setdefault(key, []).append((row, cost))
    return found


def error(key: tuple[str, str], entry: Entry, steps: list[tuple[Row, Cost]]) -> float:
    """Root mean square of the difference of exposed seconds, over the time of each step, if `key` had this entry."""
    with patch.object(overlap, "overlap_table", lambda: {**overlap_table(), key: entry}):
        layer._work.cache_clear()  # its key does not hold the table
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
        print(f"{'.'.join(key)}: {len(steps[key])} steps, {best},", end=" ")
        print(f"error {100 * errors[first]:.1f} % of a step before, {100 * errors[best]:.1f} % now")
        write_entry(key[1], found[best])


if __name__ == "__main__":
    main()
