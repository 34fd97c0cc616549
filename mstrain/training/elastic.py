"""Chooses the mesh on which a run continues with fewer hosts, with the same batch and loss curve.

The batch does not change. A smaller mesh splits it into more microbatches, so that no device holds more tokens at once
than on the mesh of the full job. Weights and moments are sharded over row x col, so meshes with at least the row x col
of the full job are preferred: no device then holds more state.
"""

import dataclasses
import math

from mstrain.mesh import MeshShape, abstract_mesh, parse_mesh
from mstrain.models.plan import make_plan
from mstrain.planner.clock import divisors
from mstrain.training.config import RunConfig


@dataclasses.dataclass(frozen=True)
class Layout:
    """`mesh` over all devices of `hosts` hosts, and the microbatches per step."""

    hosts: int
    mesh: MeshShape
    accumulate: int
    shard: str
    dropped: tuple[str, ...] = ()  # keys of a pipeline, which a smaller mesh has not

    @property
    def keys(self) -> list[str]:
        """The layout as arguments of train."""
        shard = self.shard if self.mesh.data > 1 else "none"
        return [
            f"mesh={self.mesh}",
            f"accumulate={self.accumulate}",
            *([f"shard={shard}"] if self.shard != shard else []),
            *(f"{key}=null" for key in self.dropped),
        ]

    def __str__(self) -> str:
        return f"{self.hosts} host{'s' * (self.hosts > 1)}, {' '.join(self.keys)}"


def largest_layout(config: RunConfig, total: int, left: int) -> Layout:
    """The layout of `config` on as many of the `left` hosts as possible; `total` is the number of all hosts.

    Raises ValueError when mesh=auto, when the mesh does not spread evenly over `total` hosts, or when no mesh fits.
    """
    if config.mesh == "auto":
        raise ValueError("supervise needs the mesh of all hosts. Type a mesh such as mesh=2x4x8.")
    full = parse_mesh(config.mesh)
    if full.devices % total:
        raise ValueError(
            f"mesh={full} has {full.devices} devices, which do not divide over {total} hosts. Type a mesh of all "
            "devices of all hosts."
        )
    if left >= total:
        return Layout(total, full, config.accumulate, config.shard)
    per_host = full.devices // total
    dropped = tuple(f"pipeline.{name}" for name, value in vars(config.pipeline).items() if value is not None)
    for same_state in (True, False):
        for hosts in range(left, 0, -1):
            for shape in _shapes(hosts * per_host, full):
                if (shape.row * shape.col >= full.row * full.col) != same_state:
                    continue
                accumulate = _accumulate(config, shape, full)
                if accumulate:
                    return Layout(hosts, shape, accumulate, config.shard, dropped)
    raise ValueError(f"No mesh on up to {left} of {total} hosts fits {config.model.name} with batch={config.batch}.")


def _shapes(devices: int, full: MeshShape) -> list[MeshShape]:
    """All meshes of `devices`, sorted by similarity of their sharding to `full`."""
    pairs = [(r, c) for r in divisors(devices) for c in divisors(devices // r)]
    shapes = [MeshShape(devices // (r * c), r, c) for r, c in pairs]

    def difference(shape: MeshShape) -> tuple:
        shards = abs(math.log(shape.row * shape.col / (full.row * full.col)))
        return shards, abs(math.log(shape.row / full.row)) + abs(math.log(shape.col / full.col)), shape.col

    return sorted(shapes, key=difference)


def _accumulate(config: RunConfig, shape: MeshShape, full: MeshShape) -> int | None:
    """The fewest microbatches that `shape` supports without more tokens per device than before; None if there are
    none."""
    for accumulate in divisors(config.batch):
        if accumulate * shape.devices < config.accumulate * full.devices:
            continue
        try:
            make_plan(config.parallel, config.model, abstract_mesh(shape), config.batch // accumulate, config.seq)
        except ValueError:
            continue
        return accumulate
    return None
