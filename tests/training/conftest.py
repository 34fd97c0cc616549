"""One finished run that many tests look at."""

import functools
import io

import pytest
from rich.console import Console

from tests.training.parity import QUICK
from tests.training.runs import make


@pytest.fixture(scope="session")
def small_compiles():
    """Steps compile fast, on exactly the mesh they ask for: the suite emulates more devices than most need."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mstrain.training.run.compiler_options", lambda chip: QUICK)
        patch.setattr("mstrain.mesh.fit_to_devices", lambda shape, devices: shape)
        yield


@pytest.fixture(scope="session")
def finished(tmp_path_factory, small_compiles):
    """A run of six steps on 2x4, trained: saved every two steps, evaluated every four, steps 3 and 4 profiled."""
    monkey = pytest.MonkeyPatch()
    monkey.setattr("mstrain.training.run.Console", functools.partial(Console, record=True, file=io.StringIO()))
    run = make(
        tmp_path_factory.mktemp("runs") / "finished",
        "mesh=2x4", "parallel.slices=2", "steps=6", "checkpoint.every=2", "checkpoint.keep=2", "eval.every=4",
        "profile.start=3", "profile.steps=2",
    )  # fmt: skip
    monkey.undo()
    assert run.train() == 0
    return run
