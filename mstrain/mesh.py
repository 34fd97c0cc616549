"""The device mesh: named axes, each with a size, as in `data2-row4-col8`; short forms are `RxC` and `DxRxC`.

`row` and `col` are the two tensor-parallel axes of a MeshSlice product; `data` is the data-parallel axis. `replica` is
the data-parallel axis over several TPU slices: sums over it are of shards, after those over `data`. `stage` is the axis
of a pipeline. `expert` is data-parallel outside of expert layers; inside, each of its devices has a part of the
experts. `context` splits every sequence; its devices hold the same weights. A new axis is a field of `MeshShape`; the
functions here loop over the fields.
`parse_mesh` does not initialize devices; `make_mesh` uses the devices present.
"""

import dataclasses
import difflib
import glob
import importlib.util
import math
import os
import re

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

ACCELERATORS = {
    "/dev/accel[0-9]*": "TPU",
    "/dev/vfio/[0-9]*": "TPU",
    "/dev/nvidia[0-9]*": "GPU",
    "/dev/kfd": "GPU",  # AMD
    "/dev/dxg": "GPU",  # Windows' subsystem for Linux
}


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Number of devices along each mesh axis, outermost first."""

    replica: int = dataclasses.field(default=1, kw_only=True)
    stage: int = dataclasses.field(default=1, kw_only=True)
    data: int = 1
    expert: int = dataclasses.field(default=1, kw_only=True)
    context: int = dataclasses.field(default=1, kw_only=True)
    row: int = 1
    col: int = 1

    @property
    def copies(self) -> int:
        """Data-parallel copies, which have different sequences."""
        return self.replica * self.data * self.expert

    @property
    def axes(self) -> dict[str, int]:
        """Size of every axis by name."""
        return dataclasses.asdict(self)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.axes.values())

    @property
    def devices(self) -> int:
        return math.prod(self.sizes)

    def __str__(self) -> str:
        """The long form for `parse_mesh`: rows, columns, and other axes with more than one device."""
        return "-".join(f"{axis}{size}" for axis, size in self.axes.items() if size > 1 or axis in ("row", "col"))


AXES = tuple(field.name for field in dataclasses.fields(MeshShape))
EMULATED = MeshShape(row=2, col=4)  # mesh=auto on a CPU


def parse_mesh(text: str) -> MeshShape:
    """Reads `RxC`, `DxRxC` or named axes such as `data2-row4-col8`; raises ValueError for other text."""
    text = str(text).strip()
    if re.fullmatch(r"[1-9]\d{0,5}(x[1-9]\d{0,5}){1,2}", text):
        sizes = [int(size) for size in text.split("x")]
        return MeshShape(**dict(zip(("row", "col") if len(sizes) == 2 else ("data", "row", "col"), sizes, strict=True)))
    parts = [re.fullmatch(r"([a-z]+)([1-9]\d{0,5})", part) for part in text.split("-")]
    sizes = [(part[1], int(part[2])) for part in parts if part]
    names = [name for name, _ in sizes]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"mesh={text} gives axis {name} twice. Type it once.")
        if name not in AXES and (near := difflib.get_close_matches(name, AXES, 1)):
            raise ValueError(f"mesh={text}: unknown axis {name!r}. Did you mean {near[0]}?")
    if len(sizes) < len(parts) or not set(names) <= set(AXES):
        raise ValueError(
            f"mesh={text!r} is not a mesh. Write rows x columns (mesh=2x4), data x rows x columns "
            f"(mesh=2x4x8), axes by name (mesh=data2-row4-col8; there are {', '.join(AXES)}), or mesh=auto."
        )
    return MeshShape(**dict(sizes))


def attached() -> str | None:
    """The accelerators of this host by their device files, such as `4 TPU device files`; None without any."""
    for pattern, kind in ACCELERATORS.items():
        if found := glob.glob(pattern):
            return f"{len(found)} {kind} device file{'s' * (len(found) > 1)}"
    return None


def skip_absent_tpu() -> None:
    """Keeps JAX from loading an installed libtpu on a host without TPUs, where it logs errors.

    Platforms that are set, by the user or by JAX for a TPU on the bus, are kept. Call it before JAX initializes.
    """
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]  JAX's stub lacks its flags
    if not platforms and importlib.util.find_spec("libtpu") and not attached():
        jax.config.update("jax_platforms", "cpu")


def emulate_devices(count: int) -> None:
    """Configures `count` CPU devices. Call it before JAX initializes its backends; it does not change accelerators.

    Without effect once backends are initialized; `make_mesh` then reports if there are too few devices.
    """
    skip_absent_tpu()
    # Emulated devices share one thread pool: two independent collectives that start in different order on different
    # devices deadlock. Hence one order on all devices, and eight threads per device (XLA reads NPROC).
    os.environ.setdefault("NPROC", str(8 * count))
    if (flag := "--xla_cpu_enable_concurrency_optimized_scheduler") not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}=false".strip()
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # backends are initialized: keep their devices
        pass


def lacks_emulated(count: int) -> bool:
    """Whether JAX has started on a CPU with fewer than `count` devices."""
    return jax.devices()[0].platform == "cpu" and jax.device_count() < count


def fit_to_devices(shape: MeshShape, available: int) -> MeshShape:
    """Multiplies the data axis so that `shape` uses all available devices.

    Raises ValueError, with meshes that fit, if there are too few devices or the remaining devices do not divide.
    """
    if shape.devices > available:
        raise ValueError(
            f"mesh={shape} needs {shape.devices} devices and {available} are present. Type {_suggest(available)}."
        )
    if available % shape.devices:
        raise ValueError(
            f"mesh={shape} uses {shape.devices} of {available} devices, and the others do not divide into "
            f"data-parallel replicas. Type {_suggest(available)}."
        )
    return dataclasses.replace(shape, data=shape.data * (available // shape.devices))


def _suggest(devices: int) -> str:
    rows = max(r for r in range(1, math.isqrt(devices) + 1) if devices % r == 0)
    shapes = [MeshShape(row=rows, col=devices // rows)]
    if devices > 1:
        shapes.append(MeshShape(data=devices))
    return " or ".join(f"mesh={shape}" for shape in shapes)


def make_mesh(shape: MeshShape, devices=None) -> Mesh:
    """The `jax.sharding.Mesh` of `shape` over `devices` (default: all), in an order that fits the torus links.

    With several TPU slices, axis `replica` runs over them. Raises ValueError if it does not have as many.
    """
    devices = jax.devices() if devices is None else devices
    if len(devices) < shape.devices:
        fit_to_devices(shape, len(devices))
    axis_types = (AxisType.Auto,) * len(AXES)
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices > 1:
        if shape.replica != slices or shape.devices != len(devices):
            per_slice = dataclasses.replace(shape, replica=1)
            raise ValueError(
                f"mesh={shape} does not fit {slices} TPU slices of {len(devices) // slices} devices, which are joined "
                f"by the data center network. Type mesh=replica{slices}-{per_slice}, with sizes of one slice."
            )
    return Mesh(arrange(shape, devices[: shape.devices], slices), AXES, axis_types=axis_types)


def abstract_mesh(shape: MeshShape) -> AbstractMesh:
    """A mesh without devices, for plans."""
    return AbstractMesh(shape.sizes, AXES)


def arrange(shape: MeshShape, devices, slices: int = 1) -> np.ndarray:
    """`devices` as an array of `shape.sizes`, whose axis `replica` runs over the TPU slices.

    A mesh axis takes whole torus axes of a slice where JAX finds such an order, and parts of them otherwise.
    """
    within = dataclasses.replace(shape, replica=shape.replica // slices).sizes

    def order(split: bool):
        if slices == 1:
            return mesh_utils.create_device_mesh(within, devices, allow_split_physical_axes=split)
        across = (slices, *(1 for _ in within[1:]))
        return mesh_utils.create_hybrid_device_mesh(within, across, devices, allow_split_physical_axes=split)

    try:
        return order(split=False)
    except NotImplementedError:  # only JAX knows which meshes whole axes carry where a chip has two cores
        return order(split=True)


def platform_of(mesh: Mesh | AbstractMesh) -> str:
    """JAX's name of the platform of the mesh's devices: cpu, gpu or tpu."""
    assert not isinstance(mesh, AbstractMesh), "an abstract mesh has no devices"
    return mesh.devices.flat[0].platform


def shape_of(mesh: Mesh | AbstractMesh) -> MeshShape:
    """The `MeshShape` of a mesh from `make_mesh`, or of its abstract mesh."""
    return MeshShape(**mesh.shape)
