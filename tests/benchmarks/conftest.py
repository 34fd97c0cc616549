"""The TPU compiler, where it is installed."""

from tests.compiler.conftest import tpu_compiler  # noqa: F401
