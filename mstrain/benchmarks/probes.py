"""Programs that measure a calibration: each repeats one operation on all devices of a mesh at once.

The programs run in turn, in several rounds, so that other load on the machine affects all of them alike. The median of
the rounds is used. Emulated devices share cores, so their time is the CPU time of the process divided by the number of
cores, which other programs change little.
"""

import dataclasses
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mstrain.benchmarks.collectives import collective_step, split_axis
from mstrain.hardware.calibration import KINDS
from mstrain.mesh import AXES, platform_of
from mstrain.program.program import Program

UNROLLED = 4  # products and collectives in the body of a probe's loop; kernels, which would fuse, are one
LOOP_KERNELS = 2  # that count and compare in every iteration
ARGUMENTS = 64
TOO_BUSY = "The machine is too busy to measure it in the time limit. Type the command again when fewer programs run."
DISPATCH, ARGUMENT = "dispatch", "argument"
EXPONENTIAL, REDUCTION, TRANSPOSE = "exponential", "reduction", "transpose"


@dataclasses.dataclass(frozen=True)
class Probe:
    """One program. `key` names what it measures, `count` is the number of repetitions, and `run` starts it."""

    key: tuple
    count: int
    run: Callable


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes that are measured: edges of products, bytes of kernels and of shards, elements of other kernels.

    `expected` determines the number of repetitions: seconds of the smallest kernel, product and
    collective, FLOP/s, bytes/s.
    """

    gemm: tuple[int, ...]
    kernels: tuple[int, ...]
    shards: tuple[int, ...]
    elements: int
    largest: int  # bytes of an array on one device
    expected: tuple[float, float, float, float, float]

    def kernel_repeats(self, nbytes: float) -> int:
        """Iterations of the loop of a kernel, for about five milliseconds."""
        return self._repeats(self.expected[0], nbytes=nbytes)

    def product_repeats(self, flops: float) -> int:
        """As `kernel_repeats`, of a loop of several products."""
        return self._repeats(self.expected[1] * UNROLLED, flops=flops * UNROLLED)

    def collective_repeats(self, nbytes: float) -> int:
        """As `kernel_repeats`, of a loop of several collectives."""
        return self._repeats(self.expected[2] * UNROLLED, nbytes=nbytes * UNROLLED)

    def _repeats(self, least: float, flops: float = 0.0, nbytes: float = 0.0) -> int:
        rate, bandwidth = self.expected[3:]
        return max(1, min(20_000, math.ceil(5e-3 / (least + flops / rate + nbytes / bandwidth))))


SIZES = {
    "cpu": Sizes((8, 32, 128, 512), tuple(1 << n for n in (3, 13, 17, 20, 23)), (256, 1 << 14, 1 << 17, 1 << 20),
                 1 << 18, 1 << 24, (3e-7, 4e-6, 2e-4, 1e10, 2e9)),
    "other": Sizes((256, 1024, 4096, 16384), tuple(1 << n for n in (10, 20, 24, 28)),
                   (1 << 13, 1 << 17, 1 << 21, 1 << 25), 1 << 24, 1 << 28, (4e-6, 4e-6, 2e-5, 1e14, 1e12)),
}  # fmt: skip


def sizes_on(mesh: Mesh) -> Sizes:
    return SIZES["cpu" if platform_of(mesh) == "cpu" else "other"]


def make_probes(mesh: Mesh, dtype: jnp.dtype) -> Iterator[Probe]:
    """Compiles the probes one by one; products are of `dtype`."""
    sizes = sizes_on(mesh)
    yield Probe((DISPATCH,), 1, _program(mesh, lambda x: x + 1, (1,), 0))
    yield Probe((ARGUMENT,), 1, _many_arguments(mesh))
    for nbytes in sizes.kernels:
        shape, repeats = (max(1, nbytes // 8),), sizes.kernel_repeats(nbytes)  # read and written, float32
        yield Probe(("kernel", nbytes), repeats, _program(mesh, lambda x: 1.001 * x + 1, shape, repeats))
    rows, repeats = math.isqrt(sizes.elements), sizes.kernel_repeats(16 * sizes.elements)
    for name, step in ((EXPONENTIAL, jnp.exp), (REDUCTION, _sum_rows), (TRANSPOSE, _transposed)):
        yield Probe((name,), repeats, _program(mesh, step, (rows, rows), repeats))
    for shape in itertools.product(sizes.gemm, sizes.gemm, sizes.gemm):
        repeats = sizes.product_repeats(2.0 * math.prod(shape))
        yield Probe(("gemm", *shape), repeats * UNROLLED, _gemm(mesh, shape, dtype, repeats))
    yield from _collectives(mesh, sizes)


def _collectives(mesh: Mesh, sizes: Sizes) -> Iterator[Probe]:
    """Every kind in groups of every size along every axis, and among all devices."""
    shape = [mesh.shape[axis] for axis in AXES]
    groups = [(axis, n) for axis, length in zip(AXES, shape) for n in range(2, length + 1) if length % n == 0]
    meshes = {(axis, n): split_axis(mesh.devices, axis, n) for axis, n in groups}
    if max(shape) < mesh.size:
        meshes["all", mesh.size] = Mesh(mesh.devices.reshape(mesh.size), ("group",))
    for ((axis, n), split), kind, size in itertools.product(meshes.items(), KINDS, sizes.shards):
        if size * n <= sizes.largest:
            step, local = collective_step(kind, n, size)
            repeats = sizes.collective_repeats(size * n)
            run = _program(split, step, (local,), repeats, UNROLLED, 0.0)
            yield Probe((kind, axis, n, size), repeats * UNROLLED, run)


def _program(
    mesh: Mesh, step: Callable, shape: tuple[int, ...], repeats: int, unrolled: int = 1, value: float = 1.0
) -> Callable:
    """`step` on an array of `shape` of every device, `repeats * unrolled` times; once for no repeats."""
    spec = P(mesh.axis_names)
    full = jnp.full((mesh.size * shape[0], *shape[1:]), value, jnp.float32)
    x = jax.device_put(full, NamedSharding(mesh, spec))

    def body(_, x):
        for _ in range(unrolled):
            x = lax.optimization_barrier(step(x))
        return x

    def repeated(x):
        return lax.fori_loop(0, repeats, body, x) if repeats else step(x)

    function = jax.shard_map(repeated, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    compiled = Program("probe", function, (x,)).compile()
    return lambda: compiled(x)


def _transposed(x):
    return 1.001 * x.T


def _sum_rows(x):
    return x + jnp.sum(x, axis=1, keepdims=True)


def _many_arguments(mesh: Mesh) -> Callable:
    sharding = NamedSharding(mesh, P(mesh.axis_names))
    xs = [jax.device_put(jnp.ones(mesh.size, jnp.float32), sharding) for _ in range(ARGUMENTS)]
    compiled = Program("probe", lambda xs: xs, (xs,)).compile()
    return lambda: compiled(xs)


def _gemm(mesh: Mesh, shape: tuple[int, int, int], dtype: jnp.dtype, repeats: int) -> Callable:
    m, k, n = shape
    spec = P(mesh.axis_names)
    a, b = (jax.device_put(jnp.ones((mesh.size * r, c), dtype), NamedSharding(mesh, spec)) for r, c in ((m, k), (k, n)))

    def body(_, a, b):
        for _ in range(UNROLLED):
            y = a @ b
            a, b = lax.optimization_barrier((a.at[:1, :1].set(y[:1, :1]), b))  # otherwise XLA merges equal products
        return a

    def repeated(a, b):
        return lax.fori_loop(0, repeats, lambda i, a: body(i, a, b), a)

    function = jax.shard_map(repeated, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False)
    compiled = Program("probe", function, (a, b)).compile()
    return lambda: compiled(a, b)


@dataclasses.dataclass(frozen=True)
class Times:
    """Median seconds of one execution of every probe by its key: those that predictions use (CPU time on emulated
    devices), and wall-clock time."""

    counted: dict[tuple, float]
    wall: dict[tuple, float]


def run_rounds(
    probes: Sequence[Probe], rounds: int, end: float, progress: Callable[[str], None] = lambda text: None
) -> Times:
    """Runs every probe once a round; the first round is a warm-up and is not used.

    Stops when time.monotonic() is `end`. Raises ValueError if not even one round has been used by then.
    """
    cores = os.cpu_count() if jax.devices()[0].platform == "cpu" else None
    counted, wall = ({probe.key: [] for probe in probes} for _ in range(2))
    for number, probe in itertools.product(range(rounds + 1), probes):
        if time.monotonic() > end:
            if number < 2:
                raise ValueError(TOO_BUSY)
            break
        progress(f"Round {number} of {rounds}")
        begin, processor = time.perf_counter(), time.process_time()
        jax.block_until_ready(probe.run())
        took, used = time.perf_counter() - begin, time.process_time() - processor
        if number:
            wall[probe.key].append(took)
            counted[probe.key].append(used / cores if cores else took)
    return Times(*({key: statistics.median(times) for key, times in each.items()} for each in (counted, wall)))
