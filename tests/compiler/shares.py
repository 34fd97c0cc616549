"""Collectives of a schedule by a key of each, and how much of their time is beside compute."""

import itertools
from collections.abc import Callable, Iterable

from mstrain.compiler.replay import Transfer


def grouped(transfers: Iterable[Transfer], key: Callable[[Transfer], tuple]) -> dict[tuple, list[Transfer]]:
    return {name: [*group] for name, group in itertools.groupby(sorted(transfers, key=key), key)}


def seconds(transfers: Iterable[Transfer]) -> float:
    return sum(t.end - t.begin for t in transfers)


def describe(transfers: list[Transfer]) -> str:
    """Their number, how many are asynchronous, their time and the share of it beside compute."""
    asynchronous, total = sum(t.asynchronous for t in transfers), seconds(transfers)
    beside = sum(t.hidden for t in transfers) / total
    return f"{len(transfers)}, {asynchronous} asynchronous, {1e3 * total:.2f} ms, {beside:.0%} beside compute"
