"""Dataflow OS as one Pallas kernel: rings of remote DMA along both mesh axes overlap with the products of slices.

    python -m tests.compiler.one_kernel run 2 4 3                  rows, columns and slices, on emulated devices
    python -m tests.compiler.one_kernel compile v5p-512 32x8 262144x12288x49152 4
    python -m tests.compiler.one_kernel roofline v5p-512 32x8 262144x12288x49152

This is an experiment and not an algorithm of train.py; docs/performance.md has its figures and the reasons. `run`
interprets the kernel, compares it with MeshSlice bit by bit and detects races. `compile` compiles it for a TPU slice
and needs libtpu. `roofline` prints its time by a roofline model.

While slice s is multiplied, slice s + 1 is gathered: half of every shard is sent in each direction of a ring, to one
neighbor per hop, and the kernel forwards a hop between two tiles of the product. HBM has buffers for two slices, so a
neighbor sends slice s + 2 after slice s was multiplied. On chips with two cores, each core gathers half of the rows of
A and half of the columns of B.
"""

import dataclasses
import functools
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mstrain.compiler import machine_for, make_target
from mstrain.compiler.machine import EXPECTED, HIGH, LOW, Machine
from mstrain.compiler.topology import quiet
from mstrain.gemm import meshslice

CORE, ROW, COL = "core", "row", "col"
CORES = {"v4": 2, "v5p": 2}  # cores per device; others have one
WAYS = (1, -1)
DMA = pltpu.SemaphoreType.DMA
COUNTER = pltpu.SemaphoreType.REGULAR


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a product is divided: slices of the contracted dim, tiles of the result, and cores of a device."""

    slices: int
    tile: tuple[int, int]
    cores: int


@dataclasses.dataclass(frozen=True)
class Ring:
    """How one core gathers its part of every slice of one operand along one mesh axis.

    Attributes:
      axis: the mesh axis.
      own, place: refs of this device's part of slice s, and of device j's part in the gathered slice.
      half: the half of a ref that goes in one direction.
      sent, received, copied, free: semaphores, of the two directions but for `copied`; `received` of every hop of two
        slices.
    """

    axis: str
    own: object
    place: object
    half: object
    sent: object
    received: object
    copied: object
    free: object

    @property
    def size(self) -> int:
        return lax.axis_size(self.axis)

    def _neighbor(self, way):
        return {self.axis: (lax.axis_index(self.axis) + way) % self.size}

    def _hop(self, s, hop, way):
        place = self.half(self.place(s, (lax.axis_index(self.axis) - way * hop) % self.size), way)
        source = self.half(self.own(s), way) if isinstance(hop, int) and hop == 0 else place
        n = WAYS.index(way)
        received = self.received.at[s % 2, hop, n]  # one semaphore per hop, because hops may arrive in any order
        return pltpu.make_async_remote_copy(source, place, self.sent.at[n], received, self._neighbor(way))

    def _copy(self, s):
        return pltpu.make_async_copy(self.own(s), self.place(s, lax.axis_index(self.axis)), self.copied)

    def start(self, s):
        """Copies this device's part of slice s to its own buffer and, when free, to those of both neighbors."""
        self._copy(s).start()
        for n, way in enumerate(WAYS):
            if s >= 2:
                pl.semaphore_wait(self.free.at[n], 1)
            self._hop(s, 0, way).start()

    def forward(self, s, hop):
        for way in WAYS:
            self._hop(s, hop - 1, way).wait()
            self._hop(s, hop, way).start()

    def finish(self, s):
        for way in WAYS:
            self._hop(s, self.size - 2, way).wait()
        self._copy(s).wait()

    def release(self):
        """Signals both neighbors that the buffer of the multiplied slice is free."""
        for n, way in enumerate(WAYS):
            pl.semaphore_signal(self.free.at[n], 1, device_id=self._neighbor(-way))

    def signal(self, semaphore):
        for way in WAYS:
            pl.semaphore_signal(semaphore, 1, device_id=self._neighbor(way))


def _rings(of_a, of_b, semaphores, cut: Cut) -> tuple[Ring, Ring]:
    """The rings of A along the columns and of B along the rows; `of_a` and `of_b` are (shard, two gathered slices)."""
    (a, whole_a), (b, whole_b) = of_a, of_b
    core, (rows, k), (l, columns) = lax.axis_index(CORE), a.shape, b.shape
    deep, high, tall, wide = k // cut.slices, l // cut.slices, rows // cut.cores, columns // cut.cores

    def upper_or_lower(ref, way):
        return ref.at[pl.ds(WAYS.index(way) * (tall // 2), tall // 2)]

    def left_or_right(ref, way):
        return ref.at[:, pl.ds(WAYS.index(way) * (wide // 2), wide // 2)]

    return (
        Ring(
            COL, lambda s: a.at[pl.ds(core * tall, tall), pl.ds(s * deep, deep)],
            lambda s, j: whole_a.at[s % 2, pl.ds(core * tall, tall), pl.ds(j * deep, deep)], upper_or_lower,
            *(each.at[0] for each in semaphores),
        ),
        Ring(
            ROW, lambda s: b.at[pl.ds(s * high, high), pl.ds(core * wide, wide)],
            lambda s, i: whole_b.at[s % 2, pl.ds(i * high, high), pl.ds(core * wide, wide)], left_or_right,
            *(each.at[1] for each in semaphores),
        ),
    )  # fmt: skip


def _kernel(cut: Cut, *refs):
    a, b, y, sums, whole_a, whole_b, together, *semaphores = refs
    slices, tile, cores = dataclasses.astuple(cut)
    rings = _rings((a, whole_a), (b, whole_b), semaphores, cut)
    mine = pl.ds(lax.axis_index(CORE) * (y.shape[0] // cores), y.shape[0] // cores)
    down, across = y.shape[0] // cores // tile[0], y.shape[1] // tile[1]
    deep = whole_a.shape[-1]

    def multiply(s):
        def body(a_t, b_t, *sums_and_result):
            *before, result = sums_and_result
            if s + 1 < slices:
                step = pl.program_id(0) * across + pl.program_id(1)
                for ring in rings:
                    first, last = (n * (ring.size - 1) // (down * across) for n in (step, step + 1))
                    pl.loop(jnp.maximum(1, first), last)(functools.partial(ring.forward, s + 1))
            product = jnp.dot(a_t[...], b_t[...], precision="default", preferred_element_type=jnp.float32)
            result[...] = (before[0][...] + product if before else product).astype(result.dtype)

        block = pl.BlockSpec(tile, lambda i, j: (i, j))
        operands = [
            pl.BlockSpec((tile[0], deep), lambda i, j: (i, 0)),
            pl.BlockSpec((deep, tile[1]), lambda i, j: (0, j)),
        ]
        before = [sums.at[(s - 1) % 2, mine]] if s else []
        result = sums.at[s % 2, mine] if s + 1 < slices else y.at[mine]
        pipeline = pltpu.emit_pipeline(
            body, grid=(down, across), in_specs=[*operands, *[block] * len(before)], out_specs=[block]
        )
        pipeline(whole_a.at[s % 2, mine], whole_b.at[s % 2], *before, result)

    barrier = pltpu.get_barrier_semaphore()
    for ring in rings:
        ring.signal(barrier)
    pl.semaphore_wait(barrier, 2 * len(rings))
    for ring in rings:
        ring.start(0)
    for s in range(-1, slices):
        if 0 <= s < slices - 1:
            for ring in rings:
                ring.start(s + 1)
        if s >= 0:
            multiply(s)
        for ring in rings if s + 1 < slices else ():
            if s < 0:
                pl.loop(1, ring.size - 1)(functools.partial(ring.forward, 0))
            ring.finish(s + 1)
        pltpu.core_barrier(together, core_axis_name=CORE)
        for ring in rings if 0 <= s < slices - 2 else ():
            ring.release()


def one_kernel(a, b, slices, tile=(1024, 1024), cores=1, interpret=False, vmem=None):
    """Y_MxN = A_MxK B_KxN on one device of axes `row` and `col`, at least three devices each; shards as in `os`."""
    (m, k), (l, n) = a.shape, b.shape
    deep, high = k // slices * lax.axis_size(COL), l // slices * lax.axis_size(ROW)
    hops = max(lax.axis_size(ROW), lax.axis_size(COL)) - 1
    result = [
        jax.ShapeDtypeStruct((m, n), a.dtype), jax.ShapeDtypeStruct((2, m, n), jnp.float32),
        jax.ShapeDtypeStruct((2, m, deep), a.dtype), jax.ShapeDtypeStruct((2, high, n), a.dtype),
    ]  # fmt: skip
    kernel = pl.kernel(
        functools.partial(_kernel, Cut(slices, (min(tile[0], m // cores), min(tile[1], n)), cores)),
        result, mesh=pltpu.create_tensorcore_mesh(CORE, num_cores=cores),
        scratch_types=[COUNTER, DMA((2, 2)), DMA((2, 2, hops, 2)), DMA((2,)), COUNTER((2, 2))],
        compiler_params=pltpu.CompilerParams(collective_id=0, vmem_limit_bytes=vmem), interpret=interpret,
    )  # fmt: skip
    return kernel(a, b)[0]


def on_mesh(function, mesh):
    spec = P(ROW, COL)
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False))


def run(rows: int, cols: int, slices: int) -> None:
    """Compares the interpreted kernel with MeshSlice, and detects races."""
    from jax._src.pallas.mosaic import tpu_info
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

    tpu_info.registry["cpu"] = lambda: tpu_info.get_tpu_info_for_chip(tpu_info.ChipVersion.TPU_V6E, 1)
    mesh = Mesh(np.array(jax.devices()[: rows * cols]).reshape(rows, cols), (ROW, COL))
    rng, features = np.random.default_rng(0), 8 * slices * rows * cols
    a, b = (rng.standard_normal(shape, np.float32) for shape in ((16 * rows, features), (features, 16 * cols)))
    interpret = pltpu.InterpretParams(detect_races=True)
    kernel = on_mesh(functools.partial(one_kernel, slices=slices, tile=(8, 8), interpret=interpret), mesh)
    rival = on_mesh(lambda a, b: meshslice.os(a, b, (ROW,), (COL,), slices), mesh)
    error = np.abs(np.asarray(kernel(a, b)) - np.asarray(rival(a, b))).max()
    races = interpreter.races.races_found
    print(f"{rows}x{cols}, {slices} slices: largest difference from MeshSlice {error}, races {races}")


def compile_for(name: str, shape: str, sizes: tuple[int, int, int], slices: int, vmem: int = 49152) -> None:
    """Compiles the kernel for a TPU slice that is not present; `vmem` in KiB."""
    target = make_target(name, shape)
    t, i, o = sizes
    sharding = NamedSharding(target.mesh, P(ROW, COL))
    a, b = (jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=sharding) for dims in ((t, i), (i, o)))
    cores = CORES.get(target.tpu_slice.chip.name, 1)
    kernel = functools.partial(one_kernel, slices=slices, cores=cores, vmem=vmem * 1024)
    lowered = on_mesh(kernel, target.mesh).lower(a, b)
    with quiet():
        compiled = lowered.compile(compiler_options={"xla_tpu_scoped_vmem_limit_kib": vmem + 1024})
    memory = compiled.memory_analysis()
    print(f"{name} {shape}: compiled, temporary buffers {memory.temp_size_in_bytes / 2**20:.0f} MiB per device")


def seconds(machine: Machine, shape: tuple[int, int], sizes: tuple[int, int, int], slices: int) -> float:
    """Time of the barrier, the first all_gather, then for each slice the slowest of product, HBM and links.

    No communication overlaps with the last product. Products run at the peak of the chip; a hop takes a sync and the
    time of half of a shard on one link.
    """
    (rows, cols), (t, i, o) = shape, sizes
    m, n, deep = t // rows, o // cols, i // slices
    product = 2 * m * deep * n / machine.flops
    a, b = 2 * m * deep, 2 * deep * n
    tiled = a + b * m / 1024  # tiles of 1024 x 1024; A is read once, B once for every row of tiles
    accumulated = 8 * m * n if slices > 1 else 0
    memory = (tiled + accumulated + 2 * (a + b)) / machine.hbm_bandwidth
    hop = machine.link.all_gather
    links = max((size - 1) * (hop.sync + part / size / 2 / hop.bandwidth) for size, part in ((cols, a), (rows, b)))
    steady = max(product, memory, links)
    return hop.launch + links + (slices - 1) * steady + max(product, memory)


def roofline(name: str, shape: str, sizes: tuple[int, int, int]) -> None:
    target, (rows, cols) = make_target(name, shape), map(int, shape.split("x"))
    for slices in (s for s in range(2, 13) if sizes[1] % (s * 8 * rows) == 0 == sizes[1] % (s * 128 * cols)):
        times = [1e3 * seconds(machine_for(target, u), (rows, cols), sizes, slices) for u in (EXPECTED, LOW, HIGH)]
        first = seconds(machine_for(target), (rows, cols), sizes, slices) - 2 * sizes[0] * sizes[1] * sizes[2] / (
            rows * cols * machine_for(target).flops
        )
        spread = f"{times[0]:.2f} ({times[1]:.2f}, {times[2]:.2f}) ms"
        print(f"S={slices}: {spread}, {1e3 * first:.2f} ms more than the product at the peak of the chip")


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    if command == "run":
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
        run(*map(int, rest))
    else:
        name, shape, sizes, *slices = rest
        dims = tuple(map(int, sizes.split("x")))
        assert len(dims) == 3, sizes
        if command == "compile":
            compile_for(name, shape, dims, int(slices[0]))
        else:
            roofline(name, shape, dims)
