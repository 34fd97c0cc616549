"""The simulated operations of one matrix product on one device, slice by slice (MeshSlice paper section 3.1).

Each slice has the collectives of the dataflow and one multiplication. At most two slices are gathered ahead of the
slice that is multiplied. The product's own multiplications cannot hide the collectives of its first and last slice.
Each of these collectives is divided into two operations: an exposed part, for which other operations wait, and the
part that compiled steps hide (`mstrain.hardware.overlap`), which occupies the link but delays no operation. Values of
0 bytes order operations that share no data.
"""

from collections.abc import Sequence

from mstrain.hardware import Chip
from mstrain.hardware.overlap import Hidden, hidden_shares
from mstrain.parallel.gemms import Gemm, local_dims
from mstrain.parallel.product_cost import GEMMS
from mstrain.planner.plan import Product
from mstrain.simulator.pipeline import PipelineStep
from mstrain.simulator.placement import COL, LOCAL, ROW, TENSOR, Degrees
from mstrain.simulator.program import OpSpec

PREFETCH = 2  # slices gathered before the slice that is multiplied
KINDS = {"all_gather": "AllGather", "reduce_scatter": "ReduceScatter"}


def multiplication(product: Product, gemm: Gemm) -> OpSpec:
    """The local multiplication of one slice of a GEMM."""
    layout = product.layout
    m, k, n = local_dims(gemm, layout.rows, layout.cols, product.slices)
    shapes = ((k, m), (k, n)) if gemm.kind == "WeightGrad" else ((m, k), (k, n))
    return OpSpec(gemm.kind, shapes, layout.dtype_bytes)


def axes_of(product: Product, mesh: tuple[int, int]) -> tuple[int, int]:
    """The axes of the (rows, cols) device mesh along which a layout communicates (between columns, between rows).

    A layout that is neither the mesh nor its transpose is a ring of all tensor-parallel devices (Megatron, FSDP).
    """
    layout = product.layout
    if (layout.rows, layout.cols) == mesh and not product.turned:
        return COL, ROW
    if (layout.cols, layout.rows) == mesh:
        return ROW, COL
    return TENSOR, TENSOR


class ProductStep(PipelineStep):
    """Writes operations with one output each, and products slice by slice.

    `chip` selects the measured hidden fractions of collectives (`mstrain.hardware.overlap`). With None, only the order
    of operations decides which collectives are hidden.
    """

    def __init__(self, degrees: Degrees, chunks: int, chip: Chip | None):
        super().__init__(degrees, chunks)
        self.chip = chip

    def new(self, nbytes: float, chunk: int, category: str) -> int:
        """Allocates a value of `nbytes` for every microbatch, on the stage of a chunk; returns its number."""
        return self.slots.value(round(nbytes), self.stage(chunk), category=category)

    def emit(
        self, chunk: int, spec: OpSpec, inputs: Sequence[int], nbytes: float, category: str, axis: int = LOCAL,
        label: tuple = (),
    ) -> int:  # fmt: skip
        """Adds an operation of a chunk with one output of `nbytes` bytes; returns the output."""
        output = self.new(nbytes, chunk, category)
        self.add(spec, axis, self.stage(chunk), inputs, (output,), label=label)
        return output

    def _emit_collective(self, hidden: float, chunk: int, spec: OpSpec, *operation) -> int:
        """As `emit`, for a collective; no operation waits for the fraction `hidden` of it."""
        ((elements,),) = spec.shapes
        behind = round(hidden * elements)
        output = self.emit(chunk, spec._replace(shapes=((elements - behind,),)), *operation)
        if behind:
            inputs, _, *others = operation
            self.emit(chunk, spec._replace(shapes=((behind,),)), inputs, 0.0, *others)
        return output

    def _hidden(self, product: Product, gemm: Gemm) -> Hidden:
        """Hidden fractions of the collectives of the first and last slice of a product."""
        shares = hidden_shares(self.chip.name, product.program) if self.chip else None
        return shares[gemm.kind != "MatMul"] if shares else Hidden()

    def _moves(self, product: Product, gemm: Gemm) -> list[tuple[str, int, int, int, str]]:
        """(operation, axis, elements of a shard, elements of all shards, direction) of each collective of a slice."""
        layout, mesh = product.layout, (self.degrees.rows, self.degrees.cols)
        parts = layout.rows * layout.cols * product.slices * layout.dtype_bytes
        whole = [max(1, round(moved / parts)) for moved in layout.moving_bytes()]
        sides = zip(axes_of(product, mesh), whole, (layout.cols, layout.rows), ("columns", "rows"))
        return [
            (KINDS[kind], axis, shard, shard * count, between)
            for kind, (axis, shard, count, between) in zip(GEMMS[gemm.dataflow], sides)
            if count > 1
        ]

    def emit_gemm(
        self, chunk: int, product: Product, gemm: Gemm, inputs: Sequence[int], nbytes: float, category: str, part: tuple
    ) -> int:
        """Adds the sliced GEMM of `part` of the model, which reads `inputs`; returns its result of `nbytes` bytes.

        Labels are (*part, product, gemm, what, slice); `what` is "multiply", or the mesh direction along which a matrix
        is communicated: "columns" or "rows". The exposed time that slices add (`Hidden.left`) comes first, with labels
        (..., "columns", "exposed").
        """
        slices, size, label = product.slices, product.layout.dtype_bytes, (*part, product.name, gemm.kind)
        moves, hidden = self._moves(product, gemm), self._hidden(product, gemm)
        scatters = [move for move in moves if move[0] == "ReduceScatter"]
        for kind, axis, shard, every, between in moves if slices > 1 and hidden.left else ():
            left = max(1, round(hidden.left * slices * (every if kind == "ReduceScatter" else shard)))
            spec, what = OpSpec(kind, ((left,),), size), (*label, between, "exposed")
            inputs = (*inputs, self.emit(chunk, spec, inputs, 0.0, "workspace", axis, what))
        multiply, results, done = multiplication(product, gemm), [], []
        for index in range(slices):
            last = index == slices - 1
            waits = (*inputs, *done[index - PREFETCH : index - PREFETCH + 1]) if index >= PREFETCH else inputs
            pieces = []
            for kind, axis, shard, every, between in (move for move in moves if move[0] == "AllGather"):
                share, spec, what = (index == 0) * hidden.all_gather, OpSpec(kind, ((shard,),), size), (between, index)
                operation = spec, waits, every * size, "workspace", axis, (*label, *what)
                pieces.append(self._emit_collective(share, chunk, *operation))
            partial = scatters[0][3] * size if scatters else nbytes if last else 0.0
            kept, reads = "workspace" if scatters else category, (*inputs, *pieces, *done[-1:])
            done.append(self.emit(chunk, multiply, reads, partial, kept, label=(*label, "multiply", index)))
            for kind, axis, _, every, between in scatters:
                share, spec, what = last * hidden.reduce_scatter, OpSpec(kind, ((every,),), size), (between, index)
                reads, made = (done[-1], *results[-1:]), nbytes if last else 0.0
                operation = spec, reads, made, category, axis, (*label, *what)
                results.append(self._emit_collective(share, chunk, *operation))
        return (results or done)[-1]
