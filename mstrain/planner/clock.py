"""The time budget of a search: all of its phases check one clock."""

import math
import sys
import time
from functools import lru_cache

SEARCH_PART = 0.8  # fraction of a time budget for the search; the remainder is for simulating the best plan
OPERATIONS_PER_SECOND = 3e5  # lower bound of the simulator's speed, on a busy core


class OutOfTime(Exception):
    """The time budget is spent. The caller decides what to report."""


def check_budget(max_seconds: float) -> None:
    """Raises ValueError unless the time budget `max_seconds` is positive."""
    if not max_seconds > 0:
        raise ValueError(f"max_seconds={max_seconds} leaves no time. Type max_seconds=60.")


class Clock:
    """Measures the seconds since its construction, except those in which numba compiles or loads kernels.

    Kernels are compiled and cached once per installation, so their compilation does not count against the time limit
    of a search. `budget` is that limit in seconds, infinite by default.
    """

    def __init__(self, budget: float = math.inf):
        self.budget, self.began, self.listener = budget, time.monotonic(), None
        if "numba" in sys.modules:  # otherwise the search compiles no kernels
            from numba.core import event

            self.listener = event.TimingListener()
            event.register("numba:compiler_lock", self.listener)

    @property
    def compiled(self) -> float:
        """Seconds in which numba compiled or loaded kernels."""
        return self.listener.duration if self.listener and self.listener.done else 0.0

    @property
    def seconds(self) -> float:
        """Seconds since construction, without `compiled`."""
        return time.monotonic() - self.began - self.compiled

    @property
    def over(self) -> bool:
        """Whether the budget is spent."""
        return self.seconds > self.budget

    def check(self, operations: int = 0) -> None:
        """Raises OutOfTime if the budget is spent, or if the time left is too short to simulate `operations`."""
        if self.seconds + operations / OPERATIONS_PER_SECOND > self.budget:
            raise OutOfTime

    def summary(self, count: int, things: str, finished: bool) -> str:
        """Reports in words how many `things` a search evaluated, and the compilation time if it is 1 s or more."""
        if finished:
            done = f"Search finished in {self.seconds:.1f} s: {count:,} {things}, exhaustive."
        else:
            done = f"Search stopped after {self.seconds:.0f} s: {count:,} {things}, not exhaustive."
        if self.compiled < 1:
            return done
        return f"{done} Compiling its kernels took {self.compiled:.0f} s more, once; max_seconds does not count them."


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """All divisors of `number` in ascending order. Raises ValueError above 10^12, where the search takes too long."""
    if number > 10**12:
        raise ValueError(f"{number} is beyond every batch and cluster. Type a number up to 1e12.")
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return tuple(sorted({*small, *(number // divisor for divisor in small)}))
