"""Settings of the whole suite: eight emulated CPU devices, and where golden numbers are read from."""

import os
from pathlib import Path

# Before anything imports jax: it reads both once.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()


def pytest_addoption(parser):
    parser.addoption("--golden", metavar="DIR", default=str(Path(__file__).parent / "golden"),
                     help="folder with the golden numbers of the references (default: tests/golden)")
