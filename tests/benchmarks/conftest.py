"""The TPU compiler, where it is installed, and its absence."""

import pytest

from mstrain.compiler import topology
from tests.compiler.conftest import tpu_compiler  # noqa: F401


@pytest.fixture
def no_compiler(monkeypatch):
    topology.tpu_slice_devices.cache_clear()
    monkeypatch.setattr(topology, "missing_compiler", lambda: 'not installed. Type: pip install "jax[tpu]"')
