"""Mesh axis `expert`: whether a model's experts divide over it, and in how many slices it exchanges tokens."""

from jax.sharding import AbstractMesh, Mesh

from mstrain.gemm import Plan
from mstrain.gemm.copies import EXPERT
from mstrain.mesh import MeshShape
from mstrain.models.config import ModelConfig
from mstrain.models.parallel import ParallelConfig, parse_slices

SLICES = (4, 2, 1)  # of the exchange where nothing is known of the devices: the first that divides the tokens


def check_experts(model: ModelConfig, parallel: ParallelConfig, shape: MeshShape) -> None:
    """Raises ValueError if the experts of `model` do not divide over axis `expert`, or if a key has no effect."""
    if shape.expert > 1 and model.experts is None:
        raise ValueError(
            f"mesh={shape}: axis {EXPERT} has no effect, because the MLP of model {model.name} is dense. Type "
            f"data{shape.data * shape.expert} instead, or model.experts=8."
        )
    if model.experts and model.experts % shape.expert:
        fits = [n for n in range(2, model.experts + 1) if model.experts % n == 0]
        raise ValueError(
            f"mesh={shape}: model.experts={model.experts} do not divide into {shape.expert} equal parts. Type axis "
            f"{EXPERT} with a size out of {fits}, or a mesh= without it."
        )
    if parallel.expert_slices != "auto" and shape.expert == 1:
        raise ValueError(
            f"parallel.expert_slices={parallel.expert_slices} has no effect: mesh {shape} has no axis {EXPERT}. Remove "
            f"it, or type a mesh= such as mesh=data2-expert2-row1-col2."
        )


def expert_slices(parallel: ParallelConfig, into: Plan, sequences: int, seq: int, overlaps: bool) -> int:
    """Slices in which every device exchanges its tokens; 1 without axis `expert`.

    Args:
      into: of the first product of an expert.
      sequences: of a microbatch of one data-parallel copy.
      overlaps: whether collectives of the devices run beside products.
    """
    if into.grid.expert_parts == 1:
        return 1
    layout, mesh = into.input_layout, into.grid.mesh
    within = into.grid.size(tuple(axis for axis in layout.tokens if axis not in into.grid.copies))
    tokens = sequences * seq // (within * _context(mesh))
    if parallel.expert_slices == "auto":
        return next(count for count in SLICES if tokens % count == 0) if overlaps else 1
    slices = parse_slices(parallel.expert_slices, "parallel.expert_slices")
    if tokens % slices:
        near = sorted((n for n in range(1, min(tokens, 64) + 1) if tokens % n == 0), key=lambda n: abs(n - slices))[:3]
        raise ValueError(
            f"parallel.expert_slices={slices} does not divide the {tokens} tokens of a device. Type "
            f"parallel.expert_slices={' or '.join(map(str, sorted(near)))}."
        )
    return slices


def _context(mesh: Mesh | AbstractMesh) -> int:
    return mesh.shape.get("context", 1)
