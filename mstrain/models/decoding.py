"""A model that continues sequences by a few tokens at a time: its plan, and the shapes of kept keys and values."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mstrain.gemm import PlanPair
from mstrain.layers.past import KeysValues
from mstrain.layers.sequence_split import SequenceSplit
from mstrain.models.plan import BlockPlan
from mstrain.models.transformer import Transformer


def decoding_module(module: Transformer) -> Transformer:
    """`module` with the same parameters, for any number of tokens per sequence.

    Its plan has no stages. Its microbatches have a multiple of `plan.sequence_unit` sequences, so that every device has
    whole sequences.
    """
    plan = module.plan
    assert not plan.stages
    plan = plan.with_blocks(_with_whole_sequences)
    layouts = [plan.head.input_layout, plan.head.output_layout, plan.embedding_grid.layout]
    for block, _ in plan.every_group:
        layouts += [layout for pair in (block.attention, block.mlp) for layout in (pair.inside, pair.residual)]
    unit = math.lcm(*(plan.head.grid.size(layout.tokens) for layout in layouts))
    plan = dataclasses.replace(plan, sequence_unit=unit)
    return dataclasses.replace(module, plan=plan, remat="none", offload=None)


def past_shapes(module: Transformer, sequences: int, slots: int) -> tuple[KeysValues, ...]:
    """Abstract keys and values of `slots` tokens of all layers of each group, in the dtype of `module`."""
    return tuple(_shapes(module, block, count, sequences, slots) for block, count in module.plan.every_group)


def _shapes(module: Transformer, block: BlockPlan, layers: int, sequences: int, slots: int) -> KeysValues:
    heads, inside = block.sizes.heads, block.attention.inside
    kept = [(heads.keys_here * heads.columns, heads.width)] * 2
    if block.sizes.latent:
        kept = [(span.stored, 1) for span in block.sizes.latent.into[1:]]
    sharding = NamedSharding(block.mesh, P(None, inside.tokens, None, inside.features or None))
    shapes = ((layers, sequences, slots, *of_token) for of_token in kept)
    return KeysValues(*(jax.ShapeDtypeStruct(s, jnp.dtype(module.dtype), sharding=sharding) for s in shapes))


def _with_whole_sequences(block: BlockPlan) -> BlockPlan:
    """With whole sequences in attention, and with one slice where slices reorder tokens (dataflow `rs`); the storage of
    parameters depends on neither."""

    def pair(plans: PlanPair) -> PlanPair:
        into, out = (
            dataclasses.replace(plan, slices=1) if plan.dataflow == "rs" else plan for plan in (plans.into, plans.out)
        )
        return dataclasses.replace(plans, into=into, out=out)

    return dataclasses.replace(block, attention=pair(block.attention), mlp=pair(block.mlp), split=SequenceSplit())
