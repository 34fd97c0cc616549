"""Tables on narrow terminals."""

import pytest
from rich.console import Console

from mstrain.display.tables import decimal, make_table

COLUMNS = ("", "data", "remat", "ms", "+-", "MFU full", "train.py", "why")
ROWS = (
    ("1", "4", "dots-but-mlp-in", "39,412,345.6", "12.0 %", "35.1 %", "yes", "best"),
    ("2", "16", "minimal_offloaded", "51,412,345.6", "14.3 %", "30.5 %", "no", "tensor exposed +626.1 ms"),
)
NUMBERS = [[*row[:2], *row[3:7]] for row in ROWS]


def printed(width: int, wrapped=()) -> list[str]:
    console = Console(width=width, soft_wrap=True)
    with console.capture() as capture:
        console.print(make_table("Plans", COLUMNS, ROWS, ("remat", "why"), wrapped=wrapped))
    return [line.rstrip() for line in capture.get().splitlines()]


@pytest.mark.parametrize("width", [20, 60, 80, 120])
@pytest.mark.parametrize("wrapped", [(), ("why",)])
def test_numbers_are_never_cut(width, wrapped):
    text = "\n".join(printed(width, wrapped))
    assert all(number in text for row in NUMBERS for number in row)
    assert ("…" in text) == (width < 100 and not wrapped)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_texts_and_headings_give_way_until_the_table_fits(width):
    lines = printed(width)
    assert max(map(len, lines)) <= width
    assert ("minimal_offloaded" in lines[-1]) == (width == 120) and lines[-1].startswith("2   16 min")
    assert ("MFU full train.py" in lines[1]) == (width > 60)


@pytest.mark.parametrize("value, largest, least, text", [
    (3100.04, None, 1, "3100.0"), (0.0, None, 1, "0.0"), (0.25, None, 1, "0.25"), (0.00131, None, 2, "0.0013"),
    (0.0, 0.00131, 2, "0.0000"), (0.02, 7.0, 1, "0.0"), (2.0, 7.0, 2, "2.00"),
])  # fmt: skip
def test_small_numbers_have_more_decimals(value, largest, least, text):
    """All numbers of a table those of its largest one."""
    assert decimal(value, largest, least) == text
