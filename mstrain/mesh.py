"""The device mesh: axes `data`, `row`, `col`, spelled `RxC` or `DxRxC`.

`row` and `col` are the two tensor-parallel axes of a MeshSlice product, `data` replicates the model.
A mesh string is parsed without touching a device; `make_mesh` then finds (or, on a CPU, emulates) the devices.
"""

import dataclasses
import glob
import importlib.util
import math
import os
import re

import jax
from jax.sharding import AxisType, Mesh

AXES = ("data", "row", "col")
ACCELERATORS = {
    "/dev/accel[0-9]*": "TPU",
    "/dev/vfio/[0-9]*": "TPU",
    "/dev/nvidia[0-9]*": "GPU",
    "/dev/kfd": "GPU",  # AMD
    "/dev/dxg": "GPU",  # Windows' subsystem for Linux
}


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Numbers of devices along the three mesh axes."""

    data: int
    row: int
    col: int

    @property
    def devices(self) -> int:
        return self.data * self.row * self.col

    @property
    def sizes(self) -> tuple[int, int, int]:
        return (self.data, self.row, self.col)

    def __str__(self) -> str:
        sizes = self.sizes if self.data > 1 else self.sizes[1:]
        return "x".join(map(str, sizes))


def parse_mesh(text: str) -> MeshShape:
    """Reads `RxC` or `DxRxC`; raises ValueError with an example otherwise."""
    match = re.fullmatch(r"\s*(\d{1,6})x(\d{1,6})(?:x(\d{1,6}))?\s*", str(text))
    sizes = [int(n) for n in match.groups() if n] if match else []
    if not sizes or min(sizes) < 1:
        raise ValueError(
            f"mesh={text!r} is not a mesh. Write rows x columns (mesh=2x4), data x rows x columns "
            "(mesh=2x4x8), or mesh=auto."
        )
    return MeshShape(1, *sizes) if len(sizes) == 2 else MeshShape(*sizes)


def attached() -> str | None:
    """The accelerators of this host, `4 TPU device files`, told without JAX; None without any."""
    for pattern, kind in ACCELERATORS.items():
        if found := glob.glob(pattern):
            return f"{len(found)} {kind} device file{'s' * (len(found) > 1)}"
    return None


def emulate_devices(count: int) -> None:
    """Asks the CPU platform for `count` devices. Call it before JAX touches a device; it changes no accelerator.

    Later calls are no-ops for JAX once its backends exist; `make_mesh` reports if that left too few devices.
    """
    # JAX would start an installed libtpu, which complains where there is no TPU. Platforms that are set are
    # the user's word, or JAX's where it sees a TPU on the bus: one that does not start is an error then.
    if not jax.config.jax_platforms and importlib.util.find_spec("libtpu") and not attached():
        jax.config.update("jax_platforms", "cpu")
    # Emulated devices wait for each other in threads of one pool: two independent collectives that they take up
    # in different order deadlock. Hence one order on all devices, and threads to spare (XLA reads NPROC).
    os.environ.setdefault("NPROC", str(8 * count))
    if (flag := "--xla_cpu_enable_concurrency_optimized_scheduler") not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}=false".strip()
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # backends exist already: what there is decides
        pass


def fit_to_devices(shape: MeshShape, available: int) -> MeshShape:
    """Turns surplus devices into data parallelism.

    Raises ValueError, with meshes that would fit, when there are too few devices or the surplus does not divide.
    """
    if shape.devices > available:
        raise ValueError(
            f"mesh={shape} needs {shape.devices} devices and {available} are present. "
            f"Type {_suggest(available)}."
        )
    if available % shape.devices:
        raise ValueError(
            f"mesh={shape} uses {shape.devices} of {available} devices and the rest does not divide into "
            f"data-parallel copies. Type {_suggest(available)}."
        )
    return dataclasses.replace(shape, data=shape.data * (available // shape.devices))


def _suggest(devices: int) -> str:
    rows = max(r for r in range(1, math.isqrt(devices) + 1) if devices % r == 0)
    options = [f"mesh={rows}x{devices // rows}"]
    if devices > 1:
        options.append(f"mesh={devices}x1x1")
    return " or ".join(options)


def make_mesh(shape: MeshShape, devices=None) -> Mesh:
    """The `jax.sharding.Mesh` of `shape` over `devices` (all devices by default), ordered for the torus links."""
    devices = jax.devices() if devices is None else devices
    if len(devices) < shape.devices:
        fit_to_devices(shape, len(devices))
    return jax.make_mesh(
        shape.sizes, AXES, axis_types=(AxisType.Auto,) * 3, devices=devices[: shape.devices]
    )


def describe_mesh(mesh: Mesh) -> str:
    """Sizes along `data`, `row` and `col`."""
    return "x".join(map(str, mesh.devices.shape))
