"""A comparison while it runs: each row is told and kept as soon as it is done."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from mstrain.benchmarks.cases import Case
from mstrain.benchmarks.table import Report, Row, failed, summarise, write_numbers


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What will be compared: the report without rows, and how to get its rows, `parts` from each case."""

    head: Report
    cases: list[Case]
    parts: int
    rows_of: Callable[[Case], Iterator[Row]]

    @property
    def planned(self) -> int:
        """Rows of the whole table."""
        return len(self.cases) * self.parts

    def rows(self, starts: Callable[[Case], None] = lambda case: None) -> Iterator[tuple[int, Row]]:
        """(number of planned rows that are dealt with, row), calling `starts` before each case.

        A case that cannot run says why in one row, which stands for those that it did not give.
        """
        for index, case in enumerate(self.cases):
            starts(case)
            done = index * self.parts
            try:
                for row in self.rows_of(case):
                    done += 1
                    yield done, row
            except (ValueError, RuntimeError) as error:
                yield (index + 1) * self.parts, failed(case, self.head.bench, error)


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
    """Every row, each printed and written to `folder` before the next is begun.

    An interrupted comparison leaves benchmark.csv and benchmark.json of the rows it has; `unfinished` in the
    latter counts the others.
    """
    report, progress = comparison.head, Progress(comparison.planned)
    with console.status("Starting") as status:

        def starts(case: Case) -> None:
            status.update(f"{case.model.name}: {case.algorithm} on {case.mesh}")

        for done, row in comparison.rows(starts):
            unfinished = comparison.planned - done
            report = dataclasses.replace(report, rows=[*report.rows, row], unfinished=unfinished)
            write_numbers(report, folder)
            console.print(progress.line(done, summarise(row)), soft_wrap=True)
    return report


def duration(seconds: float) -> str:
    """`45 s`, `2 min 10 s` or `1 h 5 min`."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 1:
        return f"{rest} s"
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
