"""bench=collectives: measures collectives on the devices present and writes the constants of the cost model.

All groups of an axis run at once, as in training. A program chains CHAIN collectives of one kind, which reduces the
share of its start time. The largest group of an axis is the axis; smaller groups separate launch from sync.
"""

import dataclasses
import functools
import shlex
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

from mstrain.benchmarks.config import BenchmarkConfig
from mstrain.benchmarks.links import Fit, Sample, fit_link
from mstrain.benchmarks.measured import describe_devices, start_devices
from mstrain.display.tables import make_table, write_csv
from mstrain.hardware import chip_for, collective_seconds
from mstrain.hardware.constants import AxisLinks, Constants
from mstrain.mesh import AXES, MeshShape, make_mesh

KINDS = ("all_gather", "reduce_scatter", "permute")
CHAIN = 4
SIZES = {  # bytes of a shard: 4 KiB to 4 MiB, and 8 KiB to 128 MiB
    "cpu": [4**i << 10 for i in range(1, 7)],
    "other": [8 * 4**i << 10 for i in range(8)],
}
GEMM = {"cpu": 512, "other": 8192}  # edge of the product that gives the FLOP/s of a device


def measure_links(config: BenchmarkConfig, console: Console) -> int:
    """Measures every axis of one mesh, prints the fits, and writes them and constants.json to run_dir."""
    shapes = start_devices(config)
    if len(shapes) > 1:
        raise ValueError(f"bench=collectives measures one mesh. Type meshes={shapes[0]}.")
    shape, place = shapes[0], "cpu" if jax.devices()[0].platform == "cpu" else "other"
    if shape.row == shape.col == 1:
        raise ValueError(f"mesh {shape} has no link to measure along row or col. Type meshes=2x4.")
    with console.status("Starting") as status:
        samples = sample_mesh(shape, SIZES[place], config, status.update)
        rate = gemm_rate(shape, GEMM[place], config)
    groups = {(s.axis, s.collective): [] for s in samples}
    for sample in samples:
        groups[sample.axis, sample.collective].append(sample)
    fits = {key: fit_link(group) for key, group in groups.items()}
    source = f"measured on {describe_devices()}, mesh {shape}, jax {jax.__version__}"
    chip = chip_for(jax.devices()[0].device_kind)
    constants = to_constants(fits, rate, f"measured_{shape}", source, chip.hbm_bandwidth if chip else None)
    folder = Path(config.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    constants.save(folder / "constants.json")
    write_csv([dataclasses.asdict(sample) for sample in samples], folder / "collectives.csv")
    _plot(groups, fits, source, folder / "collectives.png")
    console.print(_table(fits, rate, source))
    console.print(
        f"Written: {folder}/constants.json collectives.csv collectives.png. To predict with the first, type "
        f"python benchmark.py bench=tune meshes={shape} constants={shlex.quote(str(folder / 'constants.json'))}",
        soft_wrap=True,
    )  # fmt: skip
    return 0


def sample_mesh(
    shape: MeshShape, sizes: Sequence[int], config: BenchmarkConfig, progress: Callable[[str], None]
) -> list[Sample]:
    """Times every kind at every size (bytes of a shard) in groups of every size along every axis."""
    devices = make_mesh(shape, jax.devices()[: shape.devices]).devices
    samples = []
    for axis, length in zip(AXES, shape.sizes, strict=True):
        for group in (n for n in range(2, length + 1) if length % n == 0):
            mesh = split_axis(devices, axis, group)
            for kind in KINDS:
                progress(f"{kind} among {group} devices along {axis}")
                for size in sizes:
                    seconds = time_collective(mesh, kind, size, config.warmup, config.repeats)
                    participants = 2 if kind == "permute" else group
                    samples.append(Sample(axis, kind, participants, size, seconds))
    return samples


def split_axis(devices: np.ndarray, axis: str, group: int) -> Mesh:
    """A mesh in which neighbors along `axis` form groups of `group` devices, along mesh axis `group`."""
    place = AXES.index(axis)
    sizes = [*devices.shape[:place], devices.shape[place] // group, group, *devices.shape[place + 1 :]]
    return Mesh(devices.reshape(sizes), (*AXES[: place + 1], "group", *AXES[place + 1 :]))


def time_collective(mesh: Mesh, kind: str, shard_bytes: int, warmup: int, repeats: int) -> float:
    """Median seconds of one collective of float32, `shard_bytes` as `collective_seconds` counts them."""
    step, local = collective_step(kind, mesh.shape["group"], shard_bytes)

    def chain(x):
        for _ in range(CHAIN):
            x = lax.optimization_barrier(step(x))  # XLA would remove a gather whose result is sliced again
        return x

    spec = P(mesh.axis_names)
    x = jax.device_put(jnp.zeros(local * mesh.size, jnp.float32), NamedSharding(mesh, spec))
    program = jax.jit(jax.shard_map(chain, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    return _median_seconds(lambda: program(x), warmup, repeats) / CHAIN


def collective_step(kind: str, group: int, shard_bytes: int) -> tuple[Callable, int]:
    """A collective along mesh axis `group`, and the length of the float32 vector that it maps to one as long."""
    length = shard_bytes // 4
    local = length * group if kind in ("reduce_scatter", "all_reduce") else length
    return functools.partial(_STEPS[kind], group=group, length=length), local


def _gather(x, group, length):
    return lax.slice_in_dim(lax.optimization_barrier(lax.all_gather(x, "group", tiled=True)), 0, length)


def _scatter(x, group, length):
    return lax.dynamic_update_slice(x, lax.psum_scatter(x, "group", tiled=True), (0,))


def _permute(x, group, length):
    return lax.ppermute(x, "group", [(i, (i + 1) % group) for i in range(group)])


def _reduce(x, group, length):
    return lax.psum(x, "group")


_STEPS = {"all_gather": _gather, "reduce_scatter": _scatter, "permute": _permute, "all_reduce": _reduce}


def gemm_rate(shape: MeshShape, edge: int, config: BenchmarkConfig) -> float:
    """FLOP/s of one device in a local product, all devices of the mesh busy: bf16, on a CPU float32."""
    mesh = make_mesh(shape, jax.devices()[: shape.devices])
    dtype = jnp.float32 if jax.devices()[0].platform == "cpu" else jnp.bfloat16
    spec = P(AXES)
    x = jax.device_put(jnp.ones((mesh.size, edge, edge), dtype), NamedSharding(mesh, spec))
    product = jax.shard_map(lambda x: x @ x, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    program = jax.jit(product)
    return 2.0 * edge**3 / _median_seconds(lambda: program(x), config.warmup, config.repeats)


def _median_seconds(run: Callable, warmup: int, repeats: int) -> float:
    seconds = []
    for _ in range(warmup + repeats):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[warmup:])


def to_constants(
    fits: dict[tuple[str, str], Fit], rate: float, name: str, source: str, hbm_bandwidth: float | None = None
) -> Constants:
    """The tuner's constants; an axis of one device gets the links of the other axis."""
    axes = [axis for axis in ("row", "col") if (axis, KINDS[0]) in fits]
    links = {axis: AxisLinks(*(fits[axis, kind].link for kind in KINDS)) for axis in axes}
    return Constants(name, source, rate, links[axes[0]], links[axes[-1]], hbm_bandwidth=hbm_bandwidth)


def _table(fits: dict[tuple[str, str], Fit], rate: float, source: str) -> Table:
    columns = ("axis", "collective", "launch us", "sync us", "GB/s", "median error")
    rows = (
        (axis, kind, f"{1e6 * fit.link.launch:.1f}" if fit.separable else "-", f"{1e6 * fit.link.sync:.1f}",
         f"{fit.link.bandwidth / 1e9:.2f}", f"{fit.error:.0%}")
        for (axis, kind), fit in fits.items()
    )  # fmt: skip
    caption = "launch - : one group size only, its launch is counted as sync"
    return make_table(f"Fits, {source}; {rate / 1e9:,.1f} GFLOP/s per device", columns, rows, columns[:2], caption)


def _plot(groups: dict, fits: dict[tuple[str, str], Fit], source: str, path: Path) -> None:
    from mstrain.benchmarks.table import plt

    figure, panels = plt.subplots(1, len(KINDS), figsize=(12, 4), sharey=True, layout="constrained")
    for (axis, kind), samples in groups.items():
        panel = panels[KINDS.index(kind)]
        for count in sorted({s.participants for s in samples}):
            chosen = sorted((s for s in samples if s.participants == count), key=lambda s: s.shard_bytes)
            sizes = [s.shard_bytes for s in chosen]
            label = f"{axis}, {count} devices"
            (line,) = panel.loglog(sizes, [s.seconds for s in chosen], "o", ms=4, label=label)
            fitted = [collective_seconds(fits[axis, kind].link, size, count) for size in sizes]
            panel.loglog(sizes, fitted, "-", color=line.get_color(), lw=1)
        panel.set(title=kind, xlabel="bytes of a shard")
        panel.legend(fontsize=7)
    panels[0].set_ylabel("seconds; points measured, lines fitted")
    figure.suptitle(source, fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)
