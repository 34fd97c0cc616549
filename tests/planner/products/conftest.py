"""Constants that the tuning tests share."""

from dataclasses import replace

import pytest

from mstrain.hardware.constants import load_constants


@pytest.fixture(scope="session")
def reference():
    return load_constants("tpu_v4_reference")


@pytest.fixture(scope="session")
def simulator():
    """The simulator's constants under the paper's overlap rule."""
    return replace(load_constants("tpu_v4_simulator"), overlap="max")
