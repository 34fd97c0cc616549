"""Settings of the whole suite: sixteen emulated CPU devices and exact products."""

import functools
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path

from tests.quick import QUICK_FLAGS

os.environ["JAX_PLATFORMS"] = "cpu"  # JAX reads it when its backends are made
# Before JAX makes its backends; processes that tests start inherit it.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_FLAGS}"

import jax
import pytest
from hypothesis import settings

from mstrain.mesh import emulate_devices
from mstrain.training import prepare

emulate_devices(16)
jax.devices()  # from here on nobody changes their number
jax.config.update("jax_default_matmul_precision", "highest")
# A checkout passes or fails every time; `pytest tests --hypothesis-profile=default` looks for new counterexamples.
settings.register_profile("suite", derandomize=True)
settings.load_profile("suite")


FOLDER = Path(__file__).parent
LONGEST = [FOLDER / name for name in (
    "training/test_parity.py", "compiler/test_compile.py", "test_supervise.py", "job/test_processes.py",
    "test_notebooks.py", "test_plan_command.py", "training/test_kill.py", "checkpoints/test_local.py",
    "compiler/test_prefetch.py", "planner/test_agreement.py", "docs/test_commands.py", "faults/test_numbers.py",
    "faults/test_storage.py", "faults/test_observers.py", "soak/test_soak.py", "compiler/test_slices.py",
)]  # fmt: skip
"""Files that take longest. They come first: at the end, one that is left would keep one process waiting."""
MAPS = Path("/proc/self/maps")
MANY_MAPS = 4_000
"""Of the 65,530 that Linux allows a process; after tests/checkpoints/test_checkpoints.py alone it has 3,000."""


def pytest_collection_modifyitems(items):
    if absent := [str(path) for path in LONGEST if not path.is_file()]:
        raise pytest.UsageError(f"LONGEST in tests/conftest.py names no file of tests: {', '.join(absent)}")
    order = {path: number for number, path in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


def pytest_collection_finish():
    """Modules and collected tests stay; to look through them for garbage took 4 % of tests/layers."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000)  # as train.py


def shared_folder(tmp_path_factory) -> Path:
    """The temporary folder of all processes of this test run."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(autouse=True, scope="session")
def shared_bytecode(tmp_path_factory):
    """Where Python writes no bytecode, processes that tests start would each compile every module they import."""
    folder = shared_folder(tmp_path_factory) / "bytecode"
    with pytest.MonkeyPatch.context() as patch:
        if sys.dont_write_bytecode:
            patch.setenv("PYTHONPYCACHEPREFIX", str(folder))
            patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        yield


@pytest.fixture(autouse=True, scope="session")
def shared_programs(tmp_path_factory):
    """Runs in these processes share what they compiled, and leave the user's cache alone."""
    folder = shared_folder(tmp_path_factory) / "compiled"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "_keep_compiled", functools.partial(_keep_in, folder, prepare._keep_compiled))
        yield


def _keep_in(own: Path, keep: Callable[[str | None], None], folder: str | None) -> None:
    keep(folder and str(own))


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Compiled programs hold memory maps, of which a process may have only so many. Clearing takes 0.3 s a file."""
    yield
    if not MAPS.is_file() or MAPS.read_bytes().count(b"\n") > MANY_MAPS:
        jax.clear_caches()
        gc.collect()
