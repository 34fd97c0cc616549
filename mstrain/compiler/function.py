"""Any jitted function compiled for a TPU slice that is not present, and its schedule read."""

from collections.abc import Callable

import jax
from jax.sharding import Mesh, NamedSharding

from mstrain.compiler.compile import compile_program
from mstrain.compiler.schedule import CompiledSchedule, predict
from mstrain.compiler.topology import Target, make_target, tpu_slice_devices
from mstrain.hardware import parse_target
from mstrain.program.program import Program


def target_mesh(target: str, mesh: str) -> Mesh:
    """A mesh of the absent devices of a TPU slice: `target_mesh("v5p-64", "4x8")` has axes `row` and `col`, and
    `replica` and `data` of size 1. Other meshes can be constructed from its `devices`.

    Raises ValueError for an unknown slice, a mesh that does not fit, and without the TPU compiler (libtpu).
    """
    return make_target(target, mesh).mesh


def predict_function(function: Callable, arguments: tuple, target: str) -> CompiledSchedule:
    """Compiles `function(*arguments)`, jitted or not, and reads its schedule. Nothing is allocated or run.

    Args:
      arguments: trees of `jax.ShapeDtypeStruct` with `NamedSharding`s on one mesh of `target_mesh`.
      target: a TPU slice such as "v5p-64".

    Returns: predicted seconds, exposed communication and memory of one device. Raises ValueError when an argument has
    no sharding on the target, and DoesNotFit when a device has too little memory.
    """
    tpu_slice = parse_target(target)
    devices, leaves = tpu_slice_devices(tpu_slice), jax.tree.leaves(arguments)
    shardings = [getattr(x, "sharding", None) for x in leaves]
    meshes = {x.mesh if isinstance(x, NamedSharding) else None for x in shardings}
    if len(meshes) != 1 or None in meshes:
        raise ValueError(
            "predict needs jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec)) for every argument, "
            "all on one mesh of mstrain.target_mesh."
        )
    mesh = meshes.pop()
    if not isinstance(mesh, Mesh) or not set(mesh.devices.flat) <= set(devices):
        raise ValueError(f"the mesh of the arguments is not of {target}: take mstrain.target_mesh({target!r}, MESH).")
    program = Program(getattr(function, "__name__", "function"), function, arguments)
    return predict(compile_program(program, Target(tpu_slice, mesh)))
