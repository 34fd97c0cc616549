"""The devices of a TPU slice that is not present, and a mesh over them.

JAX's topology descriptions come from libtpu, which holds the whole XLA:TPU compiler and runs on any Linux
machine.
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import os
import re
import tempfile

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from mstrain.hardware import TpuSlice, parse_target
from mstrain.mesh import MeshShape, make_mesh, parse_mesh

# No metadata server to ask, and two compilations at once are harmless where no TPU is attached.
_ENVIRONMENT = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


@dataclasses.dataclass(frozen=True)
class Target:
    """A mesh of the absent devices of `tpu_slice`, for which programs can be compiled but on which no array can be
    placed."""

    tpu_slice: TpuSlice
    mesh: Mesh


def missing_compiler() -> str | None:
    """Why programs cannot be compiled for a TPU on this machine, and what to type; None if they can."""
    wanted = next(
        (
            match[1]
            for line in importlib.metadata.requires("jax") or ()
            if (match := re.match(r"libtpu==([\d.]+)\.\*", line))
        ),
        None,
    )
    fix = f'Type: pip install "jax[tpu]=={jax.__version__}"'
    try:
        present = importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return f"Predicting for a TPU needs its compiler, the package libtpu, which is not installed. {fix}"
    if wanted and not f"{present}.".startswith(f"{wanted}."):
        return f"libtpu {present} is not the one that jax {jax.__version__} can read ({wanted}). {fix}"
    return None


@contextlib.contextmanager
def quiet():
    """Discards what the compiler's C++ library writes to standard output and error."""
    with tempfile.TemporaryFile() as sink, contextlib.ExitStack() as stack:
        for stream in (1, 2):
            saved = os.dup(stream)
            stack.callback(os.close, saved)
            stack.callback(os.dup2, saved, stream)
            os.dup2(sink.fileno(), stream)
        yield


@functools.cache
def tpu_slice_devices(tpu_slice: TpuSlice) -> tuple:
    """The absent devices of a slice, or of several; ValueError with the remedy when the compiler is not installed."""
    if problem := missing_compiler():
        raise ValueError(problem)
    for key, value in _ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    if not jax.config.jax_platforms:  # pyright: ignore[reportAttributeAccessIssue]  JAX's stub lacks its flags
        jax.config.update("jax_platforms", "cpu")  # the host of the compilation needs no accelerator
    options: dict[str, str | int | tuple[bool, ...]] = dict(tpu_slice.topology_options)
    if tpu_slice.count > 1:
        options["num_slices"] = tpu_slice.count
    if tpu_slice.wraps:
        options["wrap"] = tuple(axis < len(tpu_slice.topology) for axis in range(3))
    with quiet():
        topology = topologies.get_topology_desc(topology_name=tpu_slice.topology_name, platform="tpu", **options)
    return tuple(topology.devices)


def make_target(tpu_slice: str | TpuSlice, mesh: str | MeshShape) -> Target:
    """Places a mesh on a slice: `make_target("v5p-64", "4x8")`.

    A mesh axis takes whole torus axes where it can (`TpuSlice.mesh_shapes`) and part of one otherwise. Surplus devices
    of one slice become data-parallel replicas. Over several slices, the size of axis `replica` is their number.

    Raises:
      ValueError: no such slice or mesh, sizes that do not match, or no compiler.
    """
    tpu_slice = parse_target(tpu_slice) if isinstance(tpu_slice, str) else tpu_slice
    shape = parse_mesh(mesh) if isinstance(mesh, str) else mesh
    copies, rest = divmod(tpu_slice.devices, shape.devices)
    if tpu_slice.count == 1 and (rest or not copies):
        raise ValueError(
            f"mesh={shape} does not divide the {tpu_slice.devices} devices of {tpu_slice.name}. Choose one of "
            f"{', '.join(f'mesh={MeshShape(row=rows, col=cols)}' for rows, cols in tpu_slice.mesh_shapes())}."
        )
    if tpu_slice.count == 1:
        shape = dataclasses.replace(shape, data=shape.data * copies)
    return Target(tpu_slice, make_mesh(shape, tpu_slice_devices(tpu_slice)))
