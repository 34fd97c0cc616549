"""Tables for a terminal and in files."""

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Column, Table
from rich.text import Text

NARROWEST = 4  # characters of a text or of a heading that is shortened


class FittedTable(Table):
    """A table that fits a narrow terminal by its texts and headings: numbers are never cut.

    Rich alone shortens all columns that do not wrap, numbers too. `texts` are the columns that may be cut; headings
    break into lines. Where the numbers alone are too wide, the table is wider than the terminal.
    """

    def __init__(self, texts: Sequence[str], **options):
        super().__init__(**options)
        self.texts = frozenset(texts)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        natural = [(self._is_text(column), *_widths(console, column)) for column in self.columns]
        room = options.max_width - sum(self.padding[1] + self.padding[3] for _ in self.columns)

        def fitted(most: int) -> list[int]:
            """Widths with texts and headings of at most so many characters."""
            return [max(0 if text else cells, min(most, max(head, cells))) for text, head, cells in natural]

        widest = max((width for _, *both in natural for width in both), default=0)
        levels = range(widest, NARROWEST, -1)
        most = next((each for each in levels if sum(fitted(each)) <= room), NARROWEST)
        for column, width in zip(self.columns, fitted(most)):
            column.width = width
        wide = sum(fitted(most)) + options.max_width - room
        yield from super().__rich_console__(console, options.update_width(max(wide, options.max_width)))

    def _is_text(self, column: Column) -> bool:
        return str(column.header) in self.texts


def _widths(console: Console, column: Column) -> tuple[int, int]:
    """Of the heading and of the widest cell."""
    cells = [max(map(cell_len, console.render_str(str(cell)).plain.splitlines()), default=0) for cell in column.cells]
    return cell_len(str(column.header)), max(cells, default=0)


def make_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[str] = (),
    caption: str | None = None, wrapped: Sequence[str] = (),
) -> Table:  # fmt: skip
    """A table without lines; columns of numbers are right-aligned, those in `left` are not.

    On a narrow terminal columns in `wrapped` wrap; where there are none, those in `left` are shortened.
    """
    table = FittedTable(
        wrapped or left, title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), caption=caption,
        caption_justify="left",
    )  # fmt: skip
    for name in columns:
        heading = Text(name, no_wrap=False, overflow="fold")
        wraps, justify = name in wrapped, "left" if name in left else "right"
        table.add_column(heading, justify=justify, no_wrap=not wraps, overflow="fold" if wraps else "ellipsis")
    for row in rows:
        table.add_row(*row)
    return table


def write_csv(rows: Sequence[Mapping], path: str | Path) -> None:
    """Writes rows, with a column for every key; what a row lacks is empty."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)


def most_grown(names: Iterable[str], loser, best) -> tuple[str, float]:
    """The attribute of `loser` among `names` that grew most over that of `best`, and by how much."""
    growth = {name: getattr(loser, name) - getattr(best, name) for name in names}
    return max(growth.items(), key=lambda pair: pair[1])


def decimal(value: float, largest: float | None = None, least: int = 1) -> str:
    """`value` with `least` decimals, or as many as show two digits of `largest`, the largest of its table, if that
    takes more; by default of the value itself.
    """
    scale = abs(value if largest is None else largest)
    digits = max(least, 1 - math.floor(math.log10(scale))) if 0 < scale < math.inf else least
    return f"{value:.{digits}f}"
