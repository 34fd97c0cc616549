"""Hand-written schedules, and a machine on which their operations take round numbers of microseconds."""

import dataclasses
import math

import numpy as np

from mstrain.compiler import KernelRates, Machine
from mstrain.compiler.torus import Torus
from mstrain.hardware import Link
from mstrain.hardware.constants import AxisLinks

LINK = Link(launch=0.0, sync=0.0, bandwidth=1e9)  # 1000 bytes in a microsecond
LINKS = AxisLinks(LINK, LINK, LINK)
KERNELS = KernelRates(flops=1e12, vector=1e6, exponentials=1e6, matrix_unit=128, overlap=1.0)
AXES = {"data": 1, "row": 2, "col": 4}


def machine(axes=AXES, closed=(False, False, False), **changes) -> Machine:
    """Every mesh axis on a torus dim of its own: x, y, z; open lines unless `closed`."""
    sizes = tuple(axes.values())
    places = np.stack(np.unravel_index(np.arange(math.prod(sizes)), sizes), -1)
    torus = Torus((*sizes, 1), (*closed, False), np.pad(places, ((0, 0), (0, 1))))
    built = Machine("toy", 1e9, 1e12, axes, torus, LINKS, KERNELS)
    return dataclasses.replace(built, **changes)


MACHINE = machine()
ROW, COL = "{{0,4},{1,5},{2,6},{3,7}}", "{{0,1,2,3},{4,5,6,7}}"

PRODUCT = """
%product (a: bf16[64,64], b: bf16[64,64]) -> bf16[64,64] {
  %a = bf16[64,64]{1,0} parameter(0)
  %b = bf16[64,64]{1,0} parameter(1)
  %c = f32[64,64]{1,0} convolution(%a, %b), dim_labels=bf_io->bf
  ROOT %r = bf16[64,64]{1,0} convert(%c)
}
"""


def module(entry: str, *computations: str) -> str:
    """A scheduled module; `entry` is the lines of the entry computation."""
    lines = (line.strip() for line in entry.strip().splitlines())
    body = "\n".join(f"  {line}" if "=" in line and line[0] in "%R" else line for line in lines)
    parts = ["HloModule toy, is_scheduled=true, num_partitions=8", PRODUCT, *computations]
    return "\n".join([*parts, "ENTRY %main (x: bf16[64,64]) -> bf16[64,64] {", body, "}", ""])


def cycles(number: int) -> str:
    return f'backend_config={{"window_config":{{"estimated_cycles":"{number}"}}}}'


def gemm(name: str, operand: str, number: int = 10_000) -> str:
    """A product of `number` cycles, by default 10 us."""
    shape = "bf16[64,64]{1,0:T(8,128)(2,1)}"
    return f"%{name} = {shape} fusion(%{operand}, %{operand}), kind=kOutput, calls=%product, {cycles(number)}"


def gather_start(name: str, operand: str, groups: str) -> str:
    """An all-gather of 64 x 64 bf16 = 8192 bytes per device: 8.192 us per other device of its group."""
    shape = "(bf16[64,64]{1,0}, bf16[128,64]{1,0})"
    return f"%{name} = {shape} all-gather-start(%{operand}), replica_groups={groups}, dimensions={{0}}"


def gather_done(name: str, start: str) -> str:
    return f"%{name} = bf16[128,64]{{1,0}} all-gather-done(%{start})"
