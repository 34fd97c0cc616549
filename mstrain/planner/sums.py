"""Small collectives around the products: the embedding's table, the sums of norms, and those of the loss.

They are those of train.py where features or the vocabulary are sharded. The cost model leaves their time out;
the simulator runs them.
"""

from mstrain.models.config import ModelConfig
from mstrain.planner.memory import WEIGHT_BYTES
from mstrain.planner.plan import Product, Products
from mstrain.planner.products import Emit, axes_of
from mstrain.simulator.program import OpSpec

SUM_BYTES = 4  # of one sum per token, float32
NORM_SUMS = {"rmsnorm": 1, "layernorm": 2}  # per token: squares, and the mean
LOSS_SUMS = 3  # per token: the largest logit, the sum of exponentials, the target's logit


def spread_of(product: Product, mesh: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """((axis, count) over which the tokens of a product's input are sharded, the same of its features)."""
    layout, (between_columns, between_rows) = product.layout, axes_of(product, mesh)
    rows, columns = (between_rows, layout.rows), (between_columns, layout.cols)
    return (columns, rows) if layout.dataflow == "rs" else (rows, columns)


def _sums(emit: Emit, product: Product, axis, numbers: int, parts: int, inputs, label) -> tuple[int, ...]:
    """An all-reduce along `axis` of so many numbers per token, the tokens being in `parts`; or nothing."""
    direction, count = axis
    if count == 1:
        return ()
    elements = max(1, numbers * product.layout.tokens // parts)
    spec = OpSpec("AllReduce", ((elements,),), SUM_BYTES)
    return (emit.add(spec, inputs, SUM_BYTES * elements, "workspace", direction, label),)


def emit_norm_sums(emit: Emit, products: Products, model: ModelConfig, inputs, label: tuple):
    """The sums over sharded features that a norm of `inputs` needs; two inputs: that its gradient needs."""
    product = products.block[0]
    (_, parts), features = spread_of(product, emit.mesh)
    numbers = NORM_SUMS[model.norm] * len(inputs)
    return _sums(emit, product, features, numbers, parts, inputs, (*label, "sums"))


def emit_loss_sums(emit: Emit, head: Product, logits: int):
    """The sums over the sharded vocabulary that the loss needs."""
    layout, (between_columns, _) = head.layout, axes_of(head, emit.mesh)
    label = ("head", "loss", "sums")
    return _sums(emit, head, (between_columns, layout.cols), LOSS_SUMS, layout.rows, (logits,), label)


def emit_table(emit: Emit, products: Products, table: int) -> int:
    """The table as lookups find it: gathered along the vocabulary, whose shards lie with the tokens."""
    (axis, count), _ = spread_of(products.head, emit.mesh)
    if count == 1:
        return table
    layout = products.head.layout
    shard = layout.projection.in_dim * layout.projection.out_dim // (layout.rows * layout.cols)
    spec, nbytes = OpSpec("AllGather", ((shard,),), layout.dtype_bytes), shard * count * layout.dtype_bytes
    return emit.add(spec, (table,), nbytes, "workspace", axis, ("embedding", "table"))


def emit_table_gradient(emit: Emit, products: Products, spec: OpSpec, inputs, nbytes: float) -> int:
    """The table's gradient of `nbytes` by the kernel `spec`, summed along the vocabulary and scattered."""
    (axis, count), _ = spread_of(products.head, emit.mesh)
    label = ("embedding", "lookup")
    if count == 1:
        return emit.add(spec, inputs, nbytes, "gradients", label=label)
    layout = products.head.layout
    elements = layout.projection.out_dim * layout.projection.in_dim * count // (layout.rows * layout.cols)
    whole = emit.add(spec, inputs, WEIGHT_BYTES * elements, "workspace", label=label)
    scatter = OpSpec("ReduceScatter", ((elements,),), WEIGHT_BYTES)
    return emit.add(scatter, (whole,), nbytes, "gradients", axis, ("embedding", "table"))
