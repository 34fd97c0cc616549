"""The change proposed for a step that does not fit: the cheapest of the smallest kind, with few compilations.

The compiler is replaced by a formula: bytes and seconds of a configuration.
"""

import dataclasses

import pytest

from mstrain.benchmarks.remedies import Remedies, groups, larger_targets
from mstrain.commands.train import load_config
from mstrain.compiler import DoesNotFit
from mstrain.hardware import parse_target
from mstrain.program.memory import GIB

STATE = 60.0
KEPT = {"none": 100.0, "dots": 60.0, "full": 8.0}  # activations of one microbatch of the whole batch
SLOWER = {"none": 1.0, "dots": 1.1, "full": 1.33}


class Machine:
    """A device of `capacity` bytes; every attempt is recorded."""

    def __init__(self, capacity: float, per_microbatch: float = 0.02, speaks: bool = True):
        self.capacity, self.per_microbatch, self.speaks, self.tried = capacity, per_microbatch, speaks, []

    def needs(self, config) -> float:
        share = 4 / parse_target(config.target).devices
        return share * (STATE + KEPT[config.remat] / config.accumulate)

    def attempt(self, config) -> float:
        self.tried.append((config.target, config.remat, config.accumulate))
        if config.accumulate > 8:
            raise ValueError("2 sequences do not divide over 4 rows")
        if self.needs(config) > self.capacity:
            raise DoesNotFit("too large", self.needs(config) if self.speaks else None)
        return SLOWER[config.remat] + self.per_microbatch * config.accumulate

    def smallest(self, *arguments):
        config = load_config(["model=tiny", "target=v5p-8", "check=true", "mesh=2x2", "batch=32", *arguments])
        search = Remedies(self.attempt, lambda c: STATE * 4 / parse_target(c.target).devices, self.capacity)
        search.learn(config, DoesNotFit("too large", self.needs(config) if self.speaks else None))
        return search.smallest(config, lambda name: dataclasses.replace(config, target=name, mesh="2x4"))


@pytest.mark.parametrize(
    ("capacity", "per_microbatch", "keys"),
    [
        (130, 0.02, "accumulate=2"),  # 2 microbatches cost less than recomputing
        (130, 0.2, "remat=dots"),  # and here more
        (80, 0.02, "accumulate=8"),
        (80, 0.2, "remat=full"),  # remat=dots does not fit
        (62, 0.02, "remat=full accumulate=4"),  # only both together
        (60.5, 0.02, "target=v5p-16 mesh=2x4 remat=dots"),
        (50, 0.02, "target=v5p-16 mesh=2x4 remat=full"),
    ],
)
def test_the_fastest_change_of_the_smallest_kind(capacity, per_microbatch, keys):
    machine = Machine(capacity, per_microbatch)
    remedy = machine.smallest()
    assert remedy.keys == keys
    speechless = Machine(capacity, per_microbatch, speaks=False)  # knows not how much
    assert speechless.smallest() == remedy
    assert len(machine.tried) <= len(speechless.tried)


def test_no_change_is_compiled_that_cannot_fit():
    machine = Machine(62)
    machine.smallest()
    assert len(machine.tried) > 2
    for _, remat, accumulate in machine.tried[2:]:  # two that fail tell what their kind needs
        config = load_config(["model=tiny", "target=v5p-8", "check=true", f"remat={remat}", "batch=32"])
        assert machine.needs(dataclasses.replace(config, accumulate=accumulate)) <= 1.1 * machine.capacity


def test_nothing_fits_where_the_state_alone_is_too_large():
    assert Machine(1).smallest() is None


def test_what_is_set_already_is_not_proposed():
    assert Machine(64).smallest("remat=full", "accumulate=2").keys == "accumulate=4"
    given = ["remat=full", "batch=12", "accumulate=3"]
    config = load_config(["model=tiny", "target=v5p-8", "check=true", *given])
    everything = [keys for lines in groups(config, lambda name: None) for line in lines for keys, _ in line]
    assert everything == ["accumulate=6", "accumulate=12"]


def test_every_change_is_told():
    heard, machine = [], Machine(80)
    config = load_config(["model=tiny", "target=v5p-8", "check=true", "batch=32"])
    Remedies(machine.attempt, lambda c: STATE, 80, heard.append).smallest(config, lambda name: None)
    assert len(heard) == len(machine.tried) + sum("at least" in text for text in heard)
    assert any("fits, 1.16 s" in text for text in heard)


def test_what_is_needed_stands_beside_the_limit():
    def attempt(config):
        raise DoesNotFit("too large", 98.5 * GIB, 95.25 * GIB if config.remat == "full" else None)

    heard, config = [], load_config(["model=tiny", "target=v5p-8", "check=true", "batch=32"])
    search = Remedies(attempt, lambda c: (60 if c.accumulate == 1 else 200) * GIB, 95.7 * GIB, heard.append)
    assert search.smallest(config, lambda name: None) is None
    assert "remat=dots: needs 98.5 GiB" in heard and "remat=full: needs 98.5 GiB of 95.2 GiB" in heard
    assert "remat=full accumulate=2: needs at least 200.0 GiB of 95.7 GiB" in heard


def test_larger_slices_double():
    assert list(larger_targets("v5p-8")) == ["v5p-16", "v5p-32", "v5p-64", "v5p-128"]
    assert list(larger_targets("v6e:4x8")) == ["v6e-64", "v6e-128", "v6e-256"]
