"""Finds the smallest change with which a step fits into memory, by compiling candidates.

Changes are tried in groups, from small to large: one key of the same run (more recomputation or more accumulation);
both keys; a larger TPU slice of the same generation. A group has one or more sequences of changes. Each sequence is
tried in order until a change fits: later changes recompute more or gather weights more often, so the first one that
fits is the fastest. Of the changes that fit in a group, the one with the fastest compiled schedule is proposed.
"""

import dataclasses
from collections.abc import Callable, Iterator

from mstrain.compiler import DoesNotFit
from mstrain.hardware import parse_target
from mstrain.models.remat import AUTO, LADDER
from mstrain.program.memory import GIB
from mstrain.training.config import RunConfig

DOUBLINGS = 4  # how often a TPU slice or the accumulation is doubled
STRONGER = ("dots", "full")  # of LADDER, those that are tried: each is compiled
CERTAIN = 1.1  # a change is not compiled if its lower bound exceeds the memory by this factor

Change = tuple[str, RunConfig]


@dataclasses.dataclass(frozen=True)
class Remedy:
    """The keys to type and the predicted seconds of a step with them."""

    keys: str
    seconds: float


class Remedies:
    """The search for a change that fits.

    `attempt(config)` compiles a step and returns its predicted seconds; it raises DoesNotFit, or ValueError for an
    illegal plan. `report(text)` is called with the result of each. `state(config)` returns the bytes of weights and
    moments per device; `capacity` is the memory of a device in bytes.
    """

    def __init__(
        self,
        attempt: Callable[[RunConfig], float],
        state: Callable[[RunConfig], float],
        capacity: float | None,
        report: Callable[[str], None] = lambda text: None,
    ):
        self._attempt, self._state, self._capacity, self._report = attempt, state, capacity, report
        self._needed: dict[tuple, tuple[int, float]] = {}  # (remat, target) -> (accumulate, bytes)

    def learn(self, config: RunConfig, error: DoesNotFit) -> None:
        """Records the memory that a configuration needs which does not fit."""
        if error.needed:
            self._needed[config.remat, config.target] = (config.accumulate, error.needed)

    def smallest(self, config: RunConfig, larger: Callable[[str], RunConfig | None]) -> Remedy | None:
        """The fastest change of the first group in which one fits; None if none fits.

        `larger(target)` returns the run on another TPU slice, or None if no plan is legal there.
        """
        for lines in groups(config, larger):
            found = [remedy for line in lines if (remedy := self._first(line))]
            if found:
                return min(found, key=lambda remedy: remedy.seconds)
        return None

    def _first(self, line: list[Change]) -> Remedy | None:
        for keys, config in line:
            try:
                if least := self._hopeless(config):
                    self._report(f"{keys}: needs at least {_amount(least, self._capacity)}")
                    continue
                seconds = self._attempt(config)
            except DoesNotFit as error:
                self.learn(config, error)
                self._report(f"{keys}: {f'needs {_amount(error.needed, error.limit)}' if error.needed else error}")
            except ValueError as error:
                self._report(f"{keys}: no, {str(error).partition(': ')[0]}")
            else:
                self._report(f"{keys}: fits, {seconds:.4g} s a step")
                return Remedy(keys, seconds)
        return None

    def _hopeless(self, config: RunConfig) -> float | None:
        """A lower bound of the bytes per device if it exceeds the memory; otherwise None.

        Memory other than weights and moments shrinks at most in proportion to the microbatch.
        """
        if self._capacity is None or (config.remat, config.target) not in self._needed:
            return None
        accumulate, needed = self._needed[config.remat, config.target]
        state = self._state(config)
        least = state + max(needed - state, 0.0) * accumulate / config.accumulate
        return least if least > CERTAIN * self._capacity else None


def _amount(needed: float, limit: float | None) -> str:
    """`98.5 GiB of 95.7 GiB`, without the limit where none is known."""
    return f"{needed / GIB:.1f} GiB" + (f" of {limit / GIB:.1f} GiB" if limit else "")


def groups(config: RunConfig, larger: Callable[[str], RunConfig | None]) -> Iterator[list[list[Change]]]:
    """Groups of sequences of changes, smallest group first; each sequence starts with its fastest change."""
    stronger = _stronger(config.remat)
    recomputed = [(f"remat={remat}", dataclasses.replace(config, remat=remat)) for remat in stronger]
    yield [recomputed, _accumulated("", config)]
    yield [_accumulated(f"{keys} ", changed) for keys, changed in recomputed]
    assert config.target is not None
    for target in larger_targets(config.target):
        if there := larger(target):
            where = f"target={target} mesh={there.mesh}"
            kinds = (config.remat, *stronger)
            yield [[(f"{where} remat={remat}", dataclasses.replace(there, remat=remat)) for remat in kinds]]


def _stronger(remat: str) -> tuple[str, ...]:
    """The policies of STRONGER that keep less than `remat`; lists of names keep as much as `full` or more."""
    if remat == AUTO:
        return ()
    below = LADDER[LADDER.index(remat) + 1 :] if remat in LADDER else ("full",)
    return tuple(kind for kind in STRONGER if kind in below)


def _accumulated(prefix: str, config: RunConfig) -> list[Change]:
    counts = [config.accumulate * 2**n for n in range(1, DOUBLINGS + 1)]
    return [
        (f"{prefix}accumulate={count}", dataclasses.replace(config, accumulate=count))
        for count in counts if config.batch % count == 0
    ]  # fmt: skip


def larger_targets(name: str) -> Iterator[str]:
    """The names of slices of the same generation with 2, 4, 8 and 16 times the devices."""
    tpu_slice = parse_target(name)
    rules = tpu_slice.chip.slice_rules
    for factor in (2**n for n in range(1, DOUBLINGS + 1)):
        size = tpu_slice.one.devices * factor // rules.devices_per_chip * rules.name_counts_per_chip
        several = f"{tpu_slice.count}x" if tpu_slice.count > 1 else ""
        try:
            yield parse_target(f"{several}{rules.prefixes[0]}-{size}").name
        except ValueError:
            continue
