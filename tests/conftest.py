"""Settings of the whole suite: sixteen emulated CPU devices and exact products."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"  # JAX reads it when its backends are made
# Compiling is most of a test's time; these save half of it and change nothing that a test is about. Processes that
# tests start inherit them.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
    ]
)

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
