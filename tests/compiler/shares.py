"""Groups the collectives of a schedule, and describes how much of their time overlaps with compute."""

import itertools
from collections.abc import Callable, Iterable

from mstrain.compiler.replay import Transfer


def grouped(transfers: Iterable[Transfer], key: Callable[[Transfer], tuple]) -> dict[tuple, list[Transfer]]:
    return {name: [*group] for name, group in itertools.groupby(sorted(transfers, key=key), key)}


def seconds(transfers: Iterable[Transfer]) -> float:
    return sum(t.end - t.begin for t in transfers)


def describe(transfers: list[Transfer]) -> str:
    """The number of transfers, how many are asynchronous, their time, and the fraction that overlaps with compute."""
    asynchronous, total = sum(t.asynchronous for t in transfers), seconds(transfers)
    hidden = sum(t.hidden for t in transfers) / total
    return f"{len(transfers)}, {asynchronous} asynchronous, {1e3 * total:.2f} ms, {hidden:.0%} overlaps with compute"
