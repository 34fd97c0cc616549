"""One finished run that many tests look at."""

import functools
import io

import pytest
from rich.console import Console

from mstrain.training.session import train
from tests.training.runs import make
from tests.tuning.test_calibrated import CALIBRATION


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """Six steps on 2x4, trained: saved every two steps, evaluated every four, steps 3 and 4 profiled, predicted."""
    recorder = functools.partial(Console, record=True, file=io.StringIO())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mstrain.training.prepare.Console", recorder)
        directory = tmp_path_factory.mktemp("runs") / "finished"
        CALIBRATION.save(directory.parent / "calibration.json")
        run = make(
            directory, f"calibration={directory.parent / 'calibration.json'}",
            "mesh=2x4", "parallel.slices=2", "steps=6", "checkpoint.every=2", "checkpoint.keep=2",
            "eval.every=4", "profile.start=3", "profile.steps=2",
        )  # fmt: skip
    assert train(run) == 0
    return run
