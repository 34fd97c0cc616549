"""Reads and writes the CSV files of docs/data."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

Row = Mapping[str, object]


def read_rows(file: Path) -> list[dict[str, str]]:
    """The rows of a file, as texts by column; none if the file does not exist."""
    if not file.exists():
        return []
    with file.open(newline="") as text:
        return list(csv.DictReader(text))


def write_rows(file: Path, columns: Sequence[str], rows: Iterable[Row]) -> None:
    """Writes a file; keys of a row that are not in `columns` are not written."""
    with file.open("w", newline="") as text:
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: row[name] for name in columns} for row in rows)


def replace_rows(
    file: Path, columns: Sequence[str], key: Sequence[str], rows: Sequence[Row], near: Sequence[str] = ()
) -> None:
    """Replaces the rows that have the same values in the columns `key` as `rows`, which all have the same ones.

    If the file has no such rows, `rows` are added after the last row with the same values in the columns `near`.
    """
    old, first = read_rows(file), rows[0]

    def like(names: Sequence[str]) -> list[int]:
        return [i for i, row in enumerate(old) if all(row[name] == str(first[name]) for name in names)]

    same = like(key)
    place = same[0] if same else max(like(near), default=len(old) - 1) + 1
    behind = [row for i, row in enumerate(old) if i >= place and i not in same]
    write_rows(file, columns, [*old[:place], *rows, *behind])
