"""The time budget of a search: one clock that all of its phases check."""

import math
import sys
import time
from functools import lru_cache

SEARCH_PART = 0.8  # of a budget, the rest is for the simulation of the winner
OPERATIONS_PER_SECOND = 3e5  # simulated at the least, on a busy core


class OutOfTime(Exception):
    """The time budget is spent. The caller decides what to report."""


def check_budget(max_seconds: float) -> None:
    """Raises ValueError for a time budget in which nothing can be done."""
    if not max_seconds > 0:
        raise ValueError(f"max_seconds={max_seconds} leaves no time. Type max_seconds=60.")


class Clock:
    """Seconds since it was made, without those in which numba compiled or loaded kernels (`compiled`).

    Kernels are compiled and cached once per installation; that does not count against the budget of a search.
    """

    def __init__(self, budget: float = math.inf):
        self.budget, self.began, self.listener = budget, time.monotonic(), None
        if "numba" in sys.modules:  # without the import nothing is compiled
            from numba.core import event

            self.listener = event.TimingListener()
            event.register("numba:compiler_lock", self.listener)

    @property
    def compiled(self) -> float:
        return self.listener.duration if self.listener and self.listener.done else 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began - self.compiled

    @property
    def over(self) -> bool:
        return self.seconds > self.budget

    def check(self, operations: int = 0) -> None:
        """OutOfTime when the budget is spent, or too little is left to simulate so many operations."""
        if self.seconds + operations / OPERATIONS_PER_SECOND > self.budget:
            raise OutOfTime

    def summary(self, count: int, things: str, finished: bool) -> str:
        """What a search did, in one sentence, and the time of compiling from 1 s up."""
        if finished:
            done = f"Search finished in {self.seconds:.1f} s: {count:,} {things}, exhaustive."
        else:
            done = f"Search stopped after {self.seconds:.0f} s: {count:,} {things}, not exhaustive."
        if self.compiled < 1:
            return done
        return f"{done} Compiling its kernels took {self.compiled:.0f} s more, once; max_seconds does not count them."


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending. Raises ValueError above 10^12, where they take too long."""
    if number > 10**12:
        raise ValueError(f"{number} is beyond every batch and cluster. Type a number up to 1e12.")
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return tuple(sorted({*small, *(number // divisor for divisor in small)}))
