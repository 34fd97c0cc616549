"""Device objects like those of JAX, of TPU slices that are not present."""

import itertools
from types import SimpleNamespace

from mstrain.hardware import TpuSlice


def absent_devices(tpu_slice: TpuSlice, origin: tuple[int, int, int] = (0, 0, 0)) -> list[SimpleNamespace]:
    """All devices of a slice whose first chip is at `origin`, in the order of JAX: the x coordinate varies fastest."""
    spans = [range(at, at + size) for at, size in zip(origin, (*tpu_slice.topology, 1, 1))]
    places = itertools.product(*reversed(spans), range(tpu_slice.chip.slice_rules.devices_per_chip))
    return [
        SimpleNamespace(
            id=number, platform="tpu", device_kind=tpu_slice.chip.device_kinds[0], coords=[x, y, z],
            core_on_chip=core, process_index=0, slice_index=0,
        )
        for number, (z, y, x, core) in enumerate(places)
    ]  # fmt: skip
