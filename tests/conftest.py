"""Settings of the whole suite: sixteen emulated CPU devices and exact products."""

import os

from tests.quick import QUICK_FLAGS

os.environ["JAX_PLATFORMS"] = "cpu"  # JAX reads it when its backends are made
# Before JAX makes its backends; processes that tests start inherit it.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_FLAGS}"

import jax
import pytest
from hypothesis import settings

from mstrain.mesh import emulate_devices

emulate_devices(16)
jax.devices()  # from here on nobody changes their number
jax.config.update("jax_default_matmul_precision", "highest")
# A checkout passes or fails every time; `pytest tests --hypothesis-profile=default` looks for new counterexamples.
settings.register_profile("suite", derandomize=True)
settings.load_profile("suite")


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Compiled programs hold memory maps, of which a process may have only so many."""
    yield
    jax.clear_caches()
