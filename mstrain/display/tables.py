"""Tables for a terminal and in files."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.table import Table


def make_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[str] = (),
    caption: str | None = None, wrapped: Sequence[str] = (),
) -> Table:  # fmt: skip
    """A table without lines; columns of numbers are right-aligned, those in `left` are not; `wrapped` may be cut."""
    table = Table(
        title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), caption=caption, caption_justify="left"
    )
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=name not in wrapped)
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
