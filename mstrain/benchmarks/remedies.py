"""A step that does not fit: the change that makes it fit and costs least, found by compiling.

Changes are tried in groups, from small to large: one key of the same run (more recomputation, or more
accumulation); both together; a larger slice of the same generation. Within a group every line is followed
from its cheapest change on until one fits, and of the lines' results the fastest by its compiled schedule is
named. Along a line each further step recomputes more, or gathers weights more often, so the first that fits
is the fastest of its line.
"""

import dataclasses
from collections.abc import Callable, Iterator

from mstrain.compiler import DoesNotFit
from mstrain.hardware import parse_target
from mstrain.models.transformer import REMAT
from mstrain.program.memory import GIB
from mstrain.training.config import RunConfig

DOUBLINGS = 4  # how often a slice, or the accumulation, is doubled
CERTAIN = 1.1  # a change is not compiled when even an estimate from below is this much too large

Change = tuple[str, RunConfig]


@dataclasses.dataclass(frozen=True)
class Remedy:
    """What to type, and the predicted seconds of a step with it."""

    keys: str
    seconds: float


class Remedies:
    """The search.

    `attempt(config)` compiles a step and returns its predicted seconds, or raises DoesNotFit, or ValueError
    when its plan is illegal; `told(text)` hears of each. `state(config)` are the bytes of weights and moments
    on a device, `capacity` those that it has.
    """

    def __init__(
        self, attempt: Callable[[RunConfig], float], state: Callable[[RunConfig], float],
        capacity: float | None, told: Callable[[str], None] = lambda text: None,
    ):
        self._attempt, self._state, self._capacity, self._told = attempt, state, capacity, told
        self._needed: dict[tuple, tuple[int, float]] = {}  # (remat, target) -> (accumulate, bytes)

    def learn(self, config: RunConfig, error: DoesNotFit) -> None:
        """Remembers what a configuration that does not fit would need."""
        if error.needed:
            self._needed[config.remat, config.target] = (config.accumulate, error.needed)

    def smallest(self, config: RunConfig, larger: Callable[[str], RunConfig | None]) -> Remedy | None:
        """The cheapest change of the first group in which something fits; None when nothing does.

        `larger(target)` is the run on another slice, None where it cannot be laid out there.
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
                    self._told(f"{keys}: needs at least {least / GIB:.0f} GiB")
                    continue
                seconds = self._attempt(config)
            except DoesNotFit as error:
                self.learn(config, error)
                self._told(f"{keys}: {f'needs {error.needed / GIB:.1f} GiB' if error.needed else error}")
            except ValueError as error:
                self._told(f"{keys}: no, {str(error).partition(': ')[0]}")
            else:
                self._told(f"{keys}: fits, {seconds:.4g} s a step")
                return Remedy(keys, seconds)
        return None

    def _hopeless(self, config: RunConfig) -> float | None:
        """Bytes that a device needs at least, where that is too much: what is no state shrinks at most as the
        microbatch does.
        """
        if self._capacity is None or (config.remat, config.target) not in self._needed:
            return None
        accumulate, needed = self._needed[config.remat, config.target]
        state = self._state(config)
        least = state + max(needed - state, 0.0) * accumulate / config.accumulate
        return least if least > CERTAIN * self._capacity else None


def groups(config: RunConfig, larger: Callable[[str], RunConfig | None]) -> Iterator[list[list[Change]]]:
    """Groups of lines of changes, the smallest group first, each line from its cheapest change on."""
    stronger = REMAT[REMAT.index(config.remat) + 1 :]
    recomputed = [(f"remat={remat}", dataclasses.replace(config, remat=remat)) for remat in stronger]
    yield [recomputed, _accumulated("", config)]
    yield [_accumulated(f"{keys} ", changed) for keys, changed in recomputed]
    for target in larger_targets(config.target):
        if there := larger(target):
            where = f"target={target} mesh={there.mesh}"
            kinds = REMAT[REMAT.index(config.remat) :]
            yield [[(f"{where} remat={remat}", dataclasses.replace(there, remat=remat)) for remat in kinds]]


def _accumulated(prefix: str, config: RunConfig) -> list[Change]:
    counts = [config.accumulate * 2**n for n in range(1, DOUBLINGS + 1)]
    return [
        (f"{prefix}accumulate={count}", dataclasses.replace(config, accumulate=count))
        for count in counts if config.batch % count == 0
    ]  # fmt: skip


def larger_targets(name: str) -> Iterator[str]:
    """The names of slices of the same generation with 2, 4, 8 and 16 times the devices."""
    tpu_slice = parse_target(name)
    rules = tpu_slice.chip.tpu_slices
    for factor in (2**n for n in range(1, DOUBLINGS + 1)):
        size = tpu_slice.devices * factor // rules.devices_per_chip * rules.name_counts_per_chip
        try:
            yield parse_target(f"{rules.prefixes[0]}-{size}").name
        except ValueError:
            continue
