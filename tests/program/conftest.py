"""The TPU compiler for tests of what it compiles."""

from tests.compiler.conftest import tpu_compiler  # noqa: F401
