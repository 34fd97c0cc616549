"""Bytes per device by category, stage by stage.

Weights, gradients and both moments of Adam are float32 and sharded over the tensor devices, as train.py
keeps them; while microbatches are accumulated there are two sets of gradients. Activations are what the
backward pass needs: under remat=none every input of a product, norm or activation function, under dots the
results of products, under full the input of a layer. No fragmentation, no compiler workspace beyond what is
named.
"""

import dataclasses
from dataclasses import dataclass
from functools import lru_cache

from mstrain.models.config import ModelConfig
from mstrain.models.transformer import count_parameters
from mstrain.planner.layer import flash
from mstrain.planner.plan import PodPlan, Product, Products
from mstrain.planner.request import PlanRequest

WEIGHT_BYTES = 4
MOMENT_BYTES = 8
SCORE_BYTES = 6  # of one score where attention keeps them: float32, and the 16-bit probability


@dataclass(frozen=True)
class Memory:
    """Bytes of one device of one stage."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    workspace: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.workspace

    @property
    def state(self) -> float:
        """What stays however little is computed at once."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def largest(self) -> str:
        """The category that takes most."""
        names = ("parameters", "gradients", "optimizer", "activations", "workspace")
        return max(names, key=lambda name: getattr(self, name))


@lru_cache(maxsize=64)
def parameter_counts(model: ModelConfig) -> tuple[int, int, int]:
    """(of one layer, of the embedding and positions, of the output projection and final norm)."""
    one, two = (count_parameters(dataclasses.replace(model, layers=layers)) for layers in (1, 2))
    assert model.vocab_size is not None  # the search refuses it
    head = model.width * model.vocab_size
    outside = one - (two - one)
    return two - one, outside if model.tied else outside - head, head


def kept_values(model: ModelConfig, remat: str) -> int:
    """Values per token that a layer keeps from the forward to the backward pass."""
    heads, kv = model.heads * model.head_dim, 2 * model.num_kv_heads * model.head_dim
    up = model.mlp_dim * (2 if model.gated else 1)
    if remat == "full":
        return model.width
    if remat == "dots":
        return model.width + heads + kv + heads + model.width + up + model.width
    return 4 * model.width + heads + kv + heads + up + model.mlp_dim


def layer_activations(model: ModelConfig, remat: str, tokens: int, seq: int, size: int) -> float:
    """Bytes that one layer keeps of one microbatch, over all tensor devices."""
    kept = size * kept_values(model, remat) * tokens
    if remat == "none" and not flash(model, seq, size):
        kept += SCORE_BYTES * model.heads * seq * tokens
    return kept


def gathered_bytes(product: Product) -> float:
    """What one device holds of gathered matrices: two slices, or the whole where there is one."""
    layout = product.layout
    col, row = layout.moving_bytes()
    whole = (col / layout.rows if layout.cols > 1 else 0) + (row / layout.cols if layout.rows > 1 else 0)
    return whole * min(2, product.slices) / product.slices


def gathered_table(head: Product) -> float:
    """Entries of the embedding's table that one device gathers along the vocabulary; none if it has all."""
    layout = head.layout
    count = layout.cols if layout.dataflow == "rs" else layout.rows
    entries = layout.projection.in_dim * layout.projection.out_dim
    return entries * count / (layout.rows * layout.cols) if count > 1 else 0.0


def stage_memory(
    request: PlanRequest, products: Products, plan: PodPlan, stage: int, chunks, in_flight: float
) -> Memory:
    """Memory of a device of `stage`, whose layers are in `chunks`, with `in_flight` microbatches held.

    Where chunks differ, all that is held is taken to be of the largest.
    """
    sizes = [end - begin for begin, end in chunks]
    model, seq = request.model, request.seq
    layer, embedding, head = parameter_counts(model)
    first, last = stage == 0, stage == plan.pipeline - 1
    count = sum(sizes) * layer + first * embedding
    if last and not (first and model.tied):
        count += head
    mine = count / plan.tensor
    layout = products.block[0].layout
    tokens, size = layout.tokens, layout.dtype_bytes
    one_layer = layer_activations(model, "none", tokens, seq, size)
    kept = max(sizes) * len(sizes) * layer_activations(model, plan.remat, tokens, seq, size) * in_flight
    gathered = max(gathered_bytes(product) for block, _ in products.groups for product in block)
    moments = [gathered + (0.0 if plan.remat == "none" else one_layer / plan.tensor)]  # a layer's backward pass
    waiting = 0.0
    if last:  # logits with a float32 copy between their passes, and the gradient of one microbatch's
        ends = plan.microbatches if request.fixed.schedule == "gpipe" else 1  # forward passes not yet turned back
        kept += size * model.width * tokens * ends
        logits = tokens * products.head.layout.projection.out_dim / plan.tensor
        waiting = (size + 4) * logits * (ends - 1)
        moments.append(gathered + (2 * size + 4) * logits)
    table = gathered_table(products.head) if first else 0.0  # ready for lookups during the whole step
    if first:  # its gradient comes when a microbatch's activations are gone
        moments.append(WEIGHT_BYTES * table - kept / in_flight / plan.tensor)
    workspace = max(moments) + waiting + size * table
    return Memory(
        WEIGHT_BYTES * mine,
        WEIGHT_BYTES * mine * (2 if plan.microbatches > 1 else 1),
        MOMENT_BYTES * mine / (plan.data if plan.sharded else 1),
        kept / plan.tensor,
        workspace,
    )
