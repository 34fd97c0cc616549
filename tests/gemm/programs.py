"""What a lowered program communicates, read off its StableHLO text in the order in which it is issued."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mstrain.gemm import ALGORITHMS, Grid

COLLECTIVES = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "collective_permute",
    "all_to_all",
    "collective_broadcast",
)
_OPERATION = re.compile(rf'(%\w+)(?::\d+)? = "?stablehlo\.({"|".join(COLLECTIVES)}|dot_general)"?[ (](.*)$')
_SAME_VALUES = re.compile(r"(%\w+)(?::\d+)? = stablehlo\.(?:reshape|transpose|optimization_barrier) (%[^:]+)")
_TYPES = re.compile(r": \((tensor<[^)]*>)\) -> (tensor<\S+>)$")
_MESH = re.compile(r"sdy\.mesh (@\w+) = <\[(.*?)\]>")
_MESH_AXES = re.compile(r"#stablehlo\.replica_group_mesh_axes<mesh = (@\w+), axes = \[(.*?)\]>")
_WIDTHS = {"f32": 4, "bf16": 2, "i32": 4, "i8": 1, "f8E4M3FN": 1, "f8E5M2": 1}


@dataclasses.dataclass(frozen=True)
class Operation:
    """One collective or product: SSA names, local shapes in bytes, and for a collective who takes part."""

    kind: str
    result: str
    operands: tuple[str, ...]
    in_bytes: int
    out_bytes: int
    groups: frozenset[tuple[int, ...]]  # of a permute: its (source, target) pairs
    out_shape: tuple[int, ...]
    out_dtype: str

    @property
    def sent(self) -> int:
        """Bytes each device sends in a ring (MeshSlice paper, section 2.3.1)."""
        if self.kind == "collective_permute":
            return self.in_bytes
        others = len(next(iter(self.groups))) - 1
        return others * {"all_gather": self.in_bytes, "reduce_scatter": self.out_bytes}[self.kind]


def operations(text: str) -> list[Operation]:
    """Products and collectives in issue order; operands by the names they had before reshapes and barriers."""
    found, open_line, named = [], None, {}
    for line in map(str.strip, _with_device_groups(text).splitlines()):
        if open_line is not None and line.startswith("})"):  # the end of a reduction's body carries its types
            line, open_line = open_line + line, None
        elif _OPERATION.search(line) and line.endswith("({"):
            open_line = line
            continue
        if "func.func" in line:
            named = {}
        if match := _SAME_VALUES.match(line):
            before = re.findall(r"%\w+(?:#\d+)?", match[2])
            after = [f"{match[1]}#{i}" for i in range(len(before))] if len(before) > 1 else [match[1]]
            named |= {new: named.get(old, old) for new, old in zip(after, before, strict=True)}
        elif match := _OPERATION.search(line):
            found.append(_operation(*match.groups(), named))
    assert open_line is None
    return found


def _with_device_groups(text: str) -> str:
    """`text` with replica groups as lists of devices, where newer JAX names the mesh axes instead."""
    sizes = {name: {axis: int(size) for axis, size in re.findall(r'"(\w+)"=(\d+)', axes)}
             for name, axes in _MESH.findall(text)}  # fmt: skip

    def spell_out(match):
        groups = _groups(sizes[match[1]], re.findall(r'name = "(\w+)"', match[2]))
        return f"dense<{groups.tolist()}> : tensor<{'x'.join(map(str, groups.shape))}xi64>"

    return _MESH_AXES.sub(spell_out, text)


def _groups(sizes: dict[str, int], axes) -> np.ndarray:
    """[groups, devices of each] for a mesh of these axis sizes, in gathering order."""
    numbers = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    numbers = np.moveaxis(numbers, [list(sizes).index(axis) for axis in axes], range(-len(axes), 0))
    return numbers.reshape(-1, math.prod(sizes[axis] for axis in axes))


def _operation(result, kind, rest, named) -> Operation:
    ins, out = _TYPES.search(rest).groups()
    groups = re.search(r"(?:replica_groups|source_target_pairs) = dense<(.*?)> : tensor", rest)
    rows = re.findall(r"\[([\d, ]+)\]", groups[1]) if groups else []
    operands = re.findall(r"%\w+(?:#\d+)?", rest.split("contracting_dims")[0].split("<{")[0])
    return Operation(
        kind=kind,
        result=result,
        operands=tuple(named.get(operand, operand) for operand in operands),
        in_bytes=_bytes(ins.split(", ")[0]),
        out_bytes=_bytes(out),
        groups=frozenset(tuple(map(int, row.split(","))) for row in rows),
        out_shape=_shape(out)[0],
        out_dtype=_shape(out)[1],
    )


def _shape(tensor):
    *dims, dtype = tensor.removeprefix("tensor<").removesuffix(">").split("x")
    return tuple(map(int, dims)), dtype


def _bytes(tensor) -> int:
    dims, dtype = _shape(tensor)
    return math.prod(dims) * _WIDTHS[dtype]


def dependencies(text: str) -> dict[str, set[str]]:
    """{SSA name: every name its value depends on} of a program without nested functions."""
    every = {}
    for line in text.splitlines():
        if match := re.match(r"\s*(%\w+)(?::\d+)? = (.*)$", line):
            used = re.findall(r"%\w+", match[2])
            every[match[1]] = set(used).union(*(every.get(name, ()) for name in used))
    return every


def collectives(ops: list[Operation]) -> list[Operation]:
    return [op for op in ops if op.kind != "dot_general"]


def groups_of(mesh: Mesh, axes: tuple[str, ...]) -> frozenset[tuple[int, ...]]:
    """Devices that meet in a collective along `axes`, numbered as in the mesh, in gathering order."""
    return frozenset(map(tuple, _groups(dict(mesh.shape), axes).tolist()))


SHAPES = {"os": ((24, 48), (48, 96)), "ls": ((48, 24), (96, 24)), "rs": ((24, 48), (24, 96))}  # of A and B


def flow(function, name: str, grid: Grid, slices=1) -> list[Operation]:
    """Operations of one GeMM: `function`, a flow of an algorithm, on float32 operands of `SHAPES[name]`."""
    return operations(flow_text(function, name, grid, slices))


def flow_text(function, name: str, grid: Grid, slices=1) -> str:
    """StableHLO of the same."""
    spec = grid.weight_spec
    product = jax.shard_map(
        functools.partial(function, rows=grid.rows, cols=grid.cols, slices=slices),
        mesh=grid.mesh,
        in_specs=(spec, spec),
        out_specs=spec,
        check_vma=False,
    )
    a, b = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in SHAPES[name])
    return jax.jit(product).lower(a, b).as_text()


def flow_of(algorithm: str, name: str, grid: Grid, slices=1) -> list[Operation]:
    return flow(getattr(ALGORITHMS[algorithm], name), name, grid, slices)


def shard_bytes(name: str, grid: Grid) -> dict[str, int]:
    """Bytes of one device's shard of A, B and Y of a float32 GeMM of `SHAPES[name]`."""
    a, b = SHAPES[name]
    contracted = {"os": (1, 0), "ls": (1, 1), "rs": (0, 0)}[name]
    y = (a[1 - contracted[0]], b[1 - contracted[1]])
    return {key: 4 * math.prod(shape) // (grid.num_rows * grid.num_cols) for key, shape in zip("aby", (a, b, y))}
