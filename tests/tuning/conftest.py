"""Fixtures that other rooms have."""

from tests.compiler.conftest import tpu_compiler  # noqa: F401
