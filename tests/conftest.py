"""Settings of the whole suite: sixteen emulated CPU devices, exact products, the folder of golden numbers."""

import os
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # JAX reads it when its backends are made

import jax  # noqa: E402

from mstrain.mesh import emulate_devices  # noqa: E402

emulate_devices(16)
jax.config.update("jax_default_matmul_precision", "highest")


def pytest_addoption(parser):
    parser.addoption(
        "--golden",
        metavar="DIR",
        default=str(Path(__file__).parent / "golden"),
        help="folder with the golden numbers of the references (default: tests/golden)",
    )
