"""The TPU compiler, where it is installed: the optional package libtpu, in the version that JAX asks for."""

import pytest

from mstrain.compiler import missing_compiler


@pytest.fixture(scope="session")
def tpu_compiler():
    if problem := missing_compiler():
        pytest.skip(problem)
