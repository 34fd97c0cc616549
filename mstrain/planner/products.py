"""The operations of one product on one device: slices that are gathered, multiplied and scattered (MeshSlice
section 3.1).

For each slice the collectives of the dataflow and one multiplication. At most two slices are gathered ahead
of the one that multiplies. No multiplication of the product hides the collectives of the first and last slice. They
are in two parts: nothing waits for the part that compiled steps hide (`mstrain.hardware.overlap`), which only occupies
the link. Values of 0 bytes order operations that share no data.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mstrain.hardware import Chip
from mstrain.hardware.overlap import Hidden, hidden_shares
from mstrain.parallel.gemms import Gemm, local_dims
from mstrain.parallel.product_cost import GEMMS
from mstrain.planner.plan import Product
from mstrain.simulator.placement import COL, LOCAL, ROW, TENSOR
from mstrain.simulator.program import OpSpec
from mstrain.simulator.slots import RankOp

PREFETCH = 2  # slices gathered ahead
KINDS = {"all_gather": "AllGather", "reduce_scatter": "ReduceScatter"}


def multiplication(product: Product, gemm: Gemm) -> OpSpec:
    layout = product.layout
    m, k, n = local_dims(gemm, layout.rows, layout.cols, product.slices)
    shapes = ((k, m), (k, n)) if gemm.kind == "WeightGrad" else ((m, k), (k, n))
    return OpSpec(gemm.kind, shapes, layout.dtype_bytes)


def axes_of(product: Product, mesh: tuple[int, int]) -> tuple[int, int]:
    """(between columns, between rows) of the layout, as axes of a device mesh of rows x cols.

    A layout that is not the mesh or its transpose is a ring of all devices (Megatron, FSDP).
    """
    layout = product.layout
    if (layout.rows, layout.cols) == mesh and not product.turned:
        return COL, ROW
    if (layout.cols, layout.rows) == mesh:
        return ROW, COL
    return TENSOR, TENSOR


@dataclass(frozen=True)
class Emit:
    """Where operations are appended: `ops`, values from `value(nbytes, category)`, on `stage` of a rows x cols `mesh`.

    `chunk` is the part of the model they belong to, which the products need not know. `chip` is that whose
    compiled steps say what is hidden; None hides what the order of operations hides.
    """

    ops: list[RankOp]
    value: Callable[[float, str], int]
    stage: int
    mesh: tuple[int, int]
    chunk: int
    chip: Chip | None = None

    def add(
        self, spec: OpSpec, inputs: Sequence[int], nbytes: float, category: str, axis: int = LOCAL, label: tuple = ()
    ) -> int:
        """Appends an operation with one output of `nbytes`; returns it."""
        output = self.value(nbytes, category)
        self.ops.append(RankOp(spec, axis, self.stage, tuple(inputs), (output,), label=label))
        return output

    def add_collective(
        self, spec: OpSpec, hidden: float, inputs: Sequence[int], nbytes: float, category: str, axis: int, label: tuple
    ) -> int:
        """`add`, of a collective; nothing waits for the share `hidden` of it."""
        ((elements,),) = spec.shapes
        behind = round(hidden * elements)
        output = self.add(spec._replace(shapes=((elements - behind,),)), inputs, nbytes, category, axis, label)
        if behind:
            self.add(spec._replace(shapes=((behind,),)), inputs, 0.0, category, axis, label)
        return output

    def hidden(self, product: Product, gemm: Gemm) -> Hidden:
        """Shares of the collectives of the first and last slice of a product."""
        shares = hidden_shares(self.chip.name, product.program) if self.chip else None
        return shares[gemm.kind != "MatMul"] if shares else Hidden()


def emit_gemm(
    emit: Emit, product: Product, gemm: Gemm, inputs: Sequence[int], nbytes: float, category: str, part: tuple
) -> int:
    """One sliced GEMM of `part` of the model, which reads `inputs`; returns its result of `nbytes` on this device.

    Labels are (*part, product, gemm, what, slice); `what` is "multiply", or the mesh direction along which a matrix is
    communicated: "columns" or "rows". What slices leave exposed comes first: (..., "columns", "exposed").
    """
    layout, slices, size = product.layout, product.slices, product.layout.dtype_bytes
    counts, directions = (layout.cols, layout.rows), ("columns", "rows")
    whole = [max(1, round(moved / layout.rows / layout.cols / slices / size)) for moved in layout.moving_bytes()]
    moves = [  # (operation, axis, elements of a shard, of all shards, between what)
        (KINDS[kind], axis, shard, shard * count, between)
        for kind, axis, shard, count, between in zip(
            GEMMS[gemm.dataflow], axes_of(product, emit.mesh), whole, counts, directions
        )
        if count > 1
    ]
    scatters, hidden = [move for move in moves if move[0] == "ReduceScatter"], emit.hidden(product, gemm)
    for kind, axis, shard, every, between in moves if slices > 1 and hidden.left else ():
        left = max(1, round(hidden.left * slices * (every if kind == "ReduceScatter" else shard)))
        what = (*part, product.name, gemm.kind, between, "exposed")
        inputs = (*inputs, emit.add(OpSpec(kind, ((left,),), size), inputs, 0.0, "workspace", axis, what))
    multiply, results, done = multiplication(product, gemm), [], []
    for index in range(slices):
        label, last = (*part, product.name, gemm.kind), index == slices - 1
        waits = (*inputs, *done[index - PREFETCH : index - PREFETCH + 1]) if index >= PREFETCH else inputs
        pieces = []
        for kind, axis, shard, every, between in (move for move in moves if move[0] == "AllGather"):
            spec, share = OpSpec(kind, ((shard,),), size), (index == 0) * hidden.all_gather
            what = (*label, between, index)
            pieces.append(emit.add_collective(spec, share, waits, every * size, "workspace", axis, what))
        partial = scatters[0][3] * size if scatters else nbytes if last else 0.0
        kept, reads = "workspace" if scatters else category, (*inputs, *pieces, *done[-1:])
        done.append(emit.add(multiply, reads, partial, kept, label=(*label, "multiply", index)))
        for kind, axis, _, every, between in scatters:
            spec, reads, what = OpSpec(kind, ((every,),), size), (done[-1], *results[-1:]), (*label, between, index)
            made, share = nbytes if last else 0.0, last * hidden.reduce_scatter
            results.append(emit.add_collective(spec, share, reads, made, category, axis, what))
    return (results or done)[-1]
