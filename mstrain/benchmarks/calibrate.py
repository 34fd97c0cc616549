"""bench=calibrate: measures the devices present and writes calibration.json, which predictions read with
calibration=."""

import dataclasses
import datetime
import os
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from mstrain.benchmarks.config import BenchmarkConfig
from mstrain.benchmarks.links import Sample, fit_link
from mstrain.benchmarks.measured import describe_devices, start_devices
from mstrain.benchmarks.probes import (
    ARGUMENT,
    ARGUMENTS,
    DISPATCH,
    EXPONENTIAL,
    LOOP_KERNELS,
    REDUCTION,
    TOO_BUSY,
    TRANSPOSE,
    UNROLLED,
    Probe,
    Times,
    make_probes,
    run_rounds,
    sizes_on,
)
from mstrain.benchmarks.step_probe import REFERENCE, reference_step
from mstrain.display.tables import make_table
from mstrain.hardware import Link
from mstrain.hardware.calibration import AXES, KINDS, Calibration, KernelTime
from mstrain.hardware.gemm_times import GemmTime
from mstrain.mesh import make_mesh, platform_of, shape_of
from mstrain.program.dtype import dtype_on
from mstrain.tuning.calibrated import predict_step

FILE = "calibration.json"
LIMIT_SECONDS = 170.0  # for compiling and running
LEAST = 1e-9  # seconds: lower bound of a difference of two noisy times


def calibrate(config: BenchmarkConfig, console: Console) -> int:
    """Measures one mesh and writes calibration.json to run_dir."""
    mesh = start_mesh(config)
    begun = time.monotonic()
    with console.status("Compiling") as status:
        end = begun + LIMIT_SECONDS
        probes, reference = compile_probes(mesh, config, end, status.update)
        times = run_rounds(probes, config.repeats, end, status.update)
    calibration = calibration_of(probes, reference, times, mesh, config)
    path = Path(config.run_dir) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    calibration.save(path)
    console.print(_table(calibration))
    console.print(
        f"Written: {path}, in {time.monotonic() - begun:.0f} s. To predict with it, type calibration={path} behind "
        f"train.py, plan.py or benchmark.py.", soft_wrap=True,
    )  # fmt: skip
    return 0


def start_mesh(config: BenchmarkConfig) -> Mesh:
    """The one mesh that is measured."""
    shapes = start_devices(config)
    if len(shapes) > 1:
        raise ValueError(f"bench=calibrate measures one mesh. Type meshes={shapes[0]}.")
    return make_mesh(shapes[0], jax.devices()[: shapes[0].devices])


def compile_probes(
    mesh: Mesh, config: BenchmarkConfig, end: float, progress: Callable[[str], None]
) -> tuple[list[Probe], str | None]:
    """All probes of this kind of device and, on emulated ones, the compiled text of the reference step, which is the
    last probe.

    Raises ValueError if time.monotonic() is `end` before all are compiled.
    """
    probes, text = [], None
    for probe in make_probes(mesh, dtype_on(platform_of(mesh), config.dtype)):
        probes.append(probe)
        if time.monotonic() > end:
            raise ValueError(TOO_BUSY)
        progress("Compiled " + " ".join(map(str, probe.key)))
    if platform_of(mesh) == "cpu":
        progress("Compiling the reference step")
        probe, text = reference_step(config, str(shape_of(mesh)))
        probes.append(probe)
    return probes, text


def calibration_of(
    probes: list[Probe], reference: str | None, times: Times, mesh: Mesh, config: BenchmarkConfig
) -> Calibration:
    """The calibration from the times of the probes; raises ValueError where a link's time does not grow.

    `reference` is the text of the reference step, or None where none was measured.
    """
    parts = _parts(probes, times, mesh, config)
    if reference is None:
        return parts
    predicted = predict_step(reference, shape_of(mesh).axes, parts).seconds
    return dataclasses.replace(parts, step_ratio=times.counted[REFERENCE] / predicted)


def _parts(probes: list[Probe], times: Times, mesh: Mesh, config: BenchmarkConfig) -> Calibration:
    device, elements = mesh.devices.flat[0], sizes_on(mesh).elements
    dispatch = times.counted[DISPATCH,]
    each = {p.key: max(times.counted[p.key] - dispatch, LEAST * p.count) / p.count for p in probes}
    sizes = [key for key in each if key[0] == "kernel"]
    launch = each[sizes[0]] / (1 + LOOP_KERNELS)  # the smallest kernel is like those of its loop
    kernels = tuple(KernelTime(key[1], max(each[key] - LOOP_KERNELS * launch, launch)) for key in sizes)
    moved = float(np.interp(8 * elements, [key[1] for key in sizes], [each[key] for key in sizes]))
    beside = launch * (1 + LOOP_KERNELS / UNROLLED)  # a kernel after every product, and those of the loop
    gemm = tuple(
        GemmTime(*key[1:], seconds=max(seconds - beside, LEAST)) for key, seconds in each.items() if key[0] == "gemm"
    )
    load = f", load average {os.getloadavg()[0]:.0f}" if hasattr(os, "getloadavg") else ""
    clock = "CPU time over cores, " if device.platform == "cpu" else ""
    return Calibration(
        device_kind=device.device_kind,
        platform=device.platform,
        devices=mesh.size,
        dtype=jnp.dtype(dtype_on(device.platform, config.dtype)).name,
        jax=jax.__version__,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        source=f"{clock}measured on {describe_devices()}{load}",
        dispatch_seconds=dispatch,
        argument_seconds=max(0.0, times.counted[ARGUMENT,] - dispatch) / (2 * ARGUMENTS - 2),
        exponential_seconds=max(0.0, each[EXPONENTIAL,] - moved) / elements,
        reduction_seconds=max(0.0, each[REDUCTION,] - moved) / elements,
        transpose_seconds=max(0.0, each[TRANSPOSE,] - moved) / elements,
        kernels=kernels,
        gemm=gemm,
        step_ratio=1.0,
        links=_links(_samples(each), device.platform),
    )


def _samples(each: dict[tuple, float]) -> list[Sample]:
    return [
        Sample(key[1], key[0], 2 if key[0] == "permute" else key[2], key[3], seconds)
        for key, seconds in each.items() if key[0] in KINDS
    ]  # fmt: skip


def _links(samples: list[Sample], platform: str) -> dict[str, dict[str, Link]]:
    """Fits by axis; on emulated devices, which have no axes, one for all."""
    if not samples:
        return {}
    present = {sample.axis for sample in samples}
    links = {}
    for axis in AXES:
        mine = present if platform == "cpu" else {axis} & present or present - {"all"}
        chosen = [sample for sample in samples if sample.axis in mine]
        links[axis] = {kind: fit_link([s for s in chosen if s.collective == kind]).link for kind in KINDS}
    return links


def _table(calibration: Calibration) -> Table:
    table = make_table(f"{calibration.source}, jax {calibration.jax}", ("what", "time or rate"), (), ("what",))
    best = max(calibration.gemm, key=lambda time: time.rate)
    micros = {
        "start a program": calibration.dispatch_seconds,
        "an argument or result more": calibration.argument_seconds,
        "launch of a kernel": calibration.kernel_launch_seconds,
    }
    for name, seconds in micros.items():
        table.add_row(name, f"{1e6 * seconds:,.2f} us")
    nanos = {
        "an exponential": calibration.exponential_seconds,
        "an element of a reduction": calibration.reduction_seconds,
        "an element of a transposition": calibration.transpose_seconds,
    }
    for name, seconds in nanos.items():
        table.add_row(name, f"{1e9 * seconds:,.2f} ns")
    table.add_row("a training step over its instructions", f"{calibration.step_ratio:,.2f} times")
    table.add_row("memory", f"{calibration.memory_bandwidth / 1e9:,.2f} GB/s")
    table.add_row(f"product {best.m}x{best.k}x{best.n}", f"{best.rate / 1e9:,.1f} GFLOP/s")
    for time_ in sorted(calibration.gemm, key=lambda time: time.rate)[:: max(1, len(calibration.gemm) // 5)]:
        table.add_row(f"product {time_.m}x{time_.k}x{time_.n}", f"{time_.rate / best.rate:.0%} of that")
    for axis, links in calibration.links.items():
        for kind, link in links.items():
            launch, sync, bandwidth = 1e6 * link.launch, 1e6 * link.sync, link.bandwidth / 1e9
            fit = f"{launch:,.0f} us + steps x ({sync:,.0f} us + bytes / {bandwidth:,.2f} GB/s)"
            table.add_row(f"{kind} along {axis}", fit)
    return table
