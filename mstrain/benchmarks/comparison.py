"""Runs a comparison; each row is printed and written as soon as it is done."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from mstrain.benchmarks.cases import Case
from mstrain.benchmarks.table import Report, Row, failed, summarize, write_numbers


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A report without rows, and the function that computes the rows: `parts` per case."""

    head: Report
    cases: list[Case]
    parts: int
    rows_of: Callable[[Case], Iterator[Row]]

    @property
    def planned(self) -> int:
        """Rows of the whole table."""
        return len(self.cases) * self.parts

    def rows(self, starts: Callable[[Case], None] = lambda case: None) -> Iterator[tuple[int, Row]]:
        """Yields (number of finished planned rows, row) and calls `starts` before each case.

        A case that fails yields one row with the reason, instead of its remaining rows. Raises the first ValueError if
        every case begins with one, because the arguments are then invalid for all.
        """
        mistakes: list[ValueError] = []
        for index, case in enumerate(self.cases):
            starts(case)
            done = index * self.parts
            try:
                for row in self.rows_of(case):
                    done += 1
                    yield done, row
            except (ValueError, RuntimeError) as error:
                yield (index + 1) * self.parts, failed(case, self.head.bench, error)
                if isinstance(error, ValueError) and done == index * self.parts:
                    mistakes.append(error)
        if mistakes and len(mistakes) == len(self.cases):
            raise mistakes[0]


class Progress:
    """Lines such as `3 of 8  2 min 10 s, about 4 min left  meshslice on row4-col8: ...`."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic):
        self._total, self._clock, self._begin = total, clock, clock()

    def line(self, done: int, text: str) -> str:
        elapsed = self._clock() - self._begin
        left = elapsed / done * (self._total - done)
        rest = f", about {duration(left)} left" if done < self._total else ""
        return f"{done} of {self._total}  {duration(elapsed)}{rest}  {text}"


def run_comparison(comparison: Comparison, folder: Path, console: Console) -> Report:
    """Computes all rows; prints each and writes it to `folder` before the next starts.

    An interrupted comparison keeps benchmark.csv and benchmark.json with its rows; `unfinished` in the latter counts
    the missing rows.
    """
    report, progress = comparison.head, Progress(comparison.planned)
    with console.status("Starting") as status:

        def starts(case: Case) -> None:
            status.update(f"{case.model.name}: {case.algorithm} on {case.mesh}")

        for done, row in comparison.rows(starts):
            unfinished = comparison.planned - done
            report = dataclasses.replace(report, rows=[*report.rows, row], unfinished=unfinished)
            write_numbers(report, folder)
            console.print(progress.line(done, summarize(row)), soft_wrap=True)
    return report


def duration(seconds: float) -> str:
    """`45 s`, `2 min 10 s` or `1 h 5 min`."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 1:
        return f"{rest} s"
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
