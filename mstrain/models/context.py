"""How the devices of a mesh split sequences: `parallel.rows` and `parallel.context` of train.py."""

import math
from collections.abc import Iterable

from jax.sharding import AbstractMesh, Mesh

from mstrain.checks import one_of
from mstrain.gemm import Heads, PlanPair
from mstrain.gemm.padding import MOST_WASTE, waste
from mstrain.hardware import Chip
from mstrain.hardware.constants import Constants, constants_for
from mstrain.hardware.efficiency import efficiency_of
from mstrain.layers.sequence_split import SequenceSplit
from mstrain.mesh import shape_of
from mstrain.models.parallel import ParallelConfig
from mstrain.parallel.exchange import Exchange

CONTEXT = "context"  # a mesh axis, and what the rows of a mesh may split
ROWS = ("auto", "sequences", CONTEXT)
EXCHANGES = ("auto", "gather", "ring")


def split_axes(
    parallel: ParallelConfig, mesh: Mesh | AbstractMesh, rows: set[tuple[str, ...]], microbatch: int, seq: int
) -> tuple[str, ...]:
    """The mesh axes that split every sequence.

    Args:
      rows: mesh axes that are rows of the grids of attention, of all layers.
      microbatch: sequences of the whole job.

    Raises:
      ValueError: the sequences do not divide, or an option is unknown or has no effect.
    """
    one_of("parallel.rows", parallel.rows, ROWS)
    one_of("parallel.context", parallel.context, EXCHANGES)
    longest = max(rows, key=lambda axes: _devices(mesh, axes))
    if parallel.rows == CONTEXT and (len(rows) > 1 or _devices(mesh, longest) == 1):
        what = "layers whose attention has other rows" if len(rows) > 1 else "one row"
        raise ValueError(
            f"parallel.rows={CONTEXT} does not work with {what} (mesh {shape_of(mesh)}, {parallel.algorithm}). Type "
            f"parallel.rows=sequences, or a mesh with an axis {CONTEXT}, such as mesh=context2-row2-col2."
        )
    use_rows = parallel.rows == CONTEXT
    if parallel.rows == "auto" and len(rows) == 1 and _devices(mesh, longest) > 1:
        unit = shape_of(mesh).copies * _devices(mesh, longest)
        too_few = waste(microbatch, -(-microbatch // unit) * unit) > MOST_WASTE
        use_rows = too_few and seq % (2 * _devices(mesh, (CONTEXT, *longest))) == 0
    axes = (CONTEXT, *(longest if use_rows else ()))
    parts = _devices(mesh, axes)
    if parts == 1:
        if parallel.context != "auto":
            raise ValueError(
                f"parallel.context={parallel.context} has no effect: no axis of mesh {shape_of(mesh)} splits a "
                f"sequence. Remove it, or type a mesh with an axis {CONTEXT}, or parallel.rows={CONTEXT}."
            )
        return ()
    _check_chunks(mesh, axes, parts, seq)
    return axes


def check_one_order(attention: Iterable[PlanPair]) -> None:
    """Raises ValueError if layers need tokens in different orders where rows split sequences."""
    regrouped = {pair.into.slices if pair.into.dataflow == "rs" else 1 for pair in attention}
    if len(regrouped) > 1:
        raise ValueError(
            f"parallel.rows={CONTEXT} needs the same dataflow and slice count in the attention of all layers. Type "
            "parallel.dataflow=os, or parallel.rows=sequences."
        )


def sequence_split(axes: tuple[str, ...], mesh: Mesh | AbstractMesh) -> SequenceSplit:
    """The split of sequences over `axes`; without axes, sequences are whole."""
    return SequenceSplit(axes, _devices(mesh, axes)) if axes else SequenceSplit()


def choose_exchange(
    parallel: ParallelConfig, heads: Heads, split: SequenceSplit, tokens: int, seq: int, chip: Chip | None,
    constants: Constants | None,
) -> str:  # fmt: skip
    """`gather` or `ring`: the configured one, or the one that costs less in bfloat16 on `chip`.

    For an unknown chip: `gather` with grouped queries. `tokens` are those of a device.
    """
    if parallel.context != "auto":
        return parallel.context
    try:
        if chip is None:
            raise ValueError
        constants = constants or constants_for(chip)
        rate = efficiency_of(chip).attention_rate(chip, heads.width)
    except ValueError:
        return "ring" if heads.keys == heads.queries else "gather"
    values = tokens * heads.width
    attention = 2.0 * values * heads.queries_here * seq / rate
    return Exchange(split.parts, 2.0 * values * heads.keys_here, 2, attention).cheaper(constants.row)


def _check_chunks(mesh, axes, parts: int, seq: int) -> None:
    if seq % (2 * parts) == 0:
        return
    near = max(1, round(seq / (2 * parts))) * 2 * parts
    context = mesh.shape[CONTEXT]
    fits = [n for n in range(1, context) if context % n == 0 and seq % (2 * n * parts // context) == 0]
    sizes = f", or axis {CONTEXT} of size {' or '.join(map(str, fits))}" if fits else ""
    raise ValueError(
        f"seq={seq} does not divide into {2 * parts} chunks, two for each of the {parts} devices of mesh "
        f"{shape_of(mesh)} that split a sequence ({', '.join(axes)}). Type seq={near}{sizes}."
    )


def _devices(mesh: Mesh | AbstractMesh, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)
