"""Sorts the tokens of every device by the experts that they chose, for the grouped products of a plan."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from mstrain.gemm.grouped import CHOICES, SORTED, TOKENS, Groups, Rows
from mstrain.gemm.local import all_gather, axis_index
from mstrain.gemm.plan import Plan


def groups_spec(plan: Plan) -> Groups:
    """The specs of `Groups` for products of `plan`: with dataflow `rs` those of all tokens of a copy."""
    axes = plan.grid.copies if plan.dataflow == "rs" else plan.grid.layout.tokens
    return Groups(*[P(axes or None)] * 3)


def group_choices(
    choices_TxK: jax.Array, experts: int, plan: Plan, capacity: int | None = None, partial: bool = False
) -> Groups:
    """Groups for products of `plan` from the experts that all tokens chose, int32 [T, K], sharded as its inputs.

    `capacity`: choices of an expert that count, those of the first tokens of the job; None for all. `partial`: whether
    choices may be `experts`, which is none.
    """
    copies, tokens = plan.grid.copies, plan.input_layout.tokens
    within = tuple(axis for axis in tokens if axis not in copies)
    gathered = within if plan.dataflow == "rs" else ()
    counted = copies if gathered else tokens

    def local(choices_TxK):
        chosen = all_gather(choices_TxK, gathered, 0).reshape(-1)
        order = jnp.argsort(chosen, stable=True).astype(jnp.int32)
        rows = jnp.zeros_like(order).at[order].set(lax.iota(jnp.int32, len(order)), unique_indices=True)
        sizes = jnp.sum(chosen[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)
        groups = Groups(order, rows, sizes)
        if partial:
            none = len(chosen)
            used = lax.iota(jnp.int32, none) < jnp.sum(sizes)
            groups = Groups(jnp.where(used, order, none), jnp.where(chosen < experts, rows, none), sizes)
        return groups if capacity is None else _cut(groups, chosen, capacity, counted)

    spec = groups_spec(plan)
    return jax.shard_map(local, mesh=plan.grid.mesh, in_specs=P(tokens or None), out_specs=spec, check_vma=False)(
        choices_TxK
    )


def dropped(choices_TxK: jax.Array, experts: int, plan: Plan, capacity: int) -> jax.Array:
    """Whether a choice does not count because its expert has `capacity` before it; bool [T, K]."""
    if plan.dataflow == "rs":  # with the same input layout, every device has the groups of its own tokens
        plan = dataclasses.replace(plan, dataflow="os", grid=plan.grid.swapped)
    groups = group_choices(choices_TxK, experts, plan, capacity)
    here = choices_TxK.size // plan.grid.size(plan.input_layout.tokens)
    return (groups.rows == here).reshape(choices_TxK.shape)


def _cut(groups: Groups, chosen, capacity: int, axes: tuple[str, ...]) -> Groups:
    """Without the choices behind the first `capacity` of each expert; devices along `axes` have other tokens."""
    none = len(chosen)
    every = all_gather(groups.sizes[None], axes, 0)
    before = jnp.sum(jnp.where(jnp.arange(len(every))[:, None] < axis_index(axes), every, 0), axis=0)
    kept = jnp.clip(capacity - before, 0, groups.sizes)
    rank = groups.rows - (jnp.cumsum(groups.sizes) - groups.sizes)[chosen]
    rows = jnp.where(rank < kept[chosen], (jnp.cumsum(kept) - kept)[chosen] + rank, none)
    choices = jnp.full_like(groups.choices, none).at[rows].set(lax.iota(jnp.int32, none), mode="drop")
    return Groups(choices, rows, kept)


def rows_into(plan: Plan, chosen: int, whole: bool = False) -> Rows:
    """The rows of the first product of an MLP, of `plan`; those of the second are `reversed`."""
    return Rows(TOKENS, CHOICES if plan.dataflow == "rs" else SORTED, chosen, whole)


def sort_values(values_TxK: jax.Array, groups: Groups, plan: Plan) -> jax.Array:
    """Values of the choices of all tokens, one for every row between the products of `plan` and its counterpart."""
    values = values_TxK.reshape(-1)
    if plan.dataflow == "rs":
        return values
    spec = P(plan.grid.layout.tokens or None)
    local = jax.shard_map(
        lambda values, groups: groups.sort(values, CHOICES),
        mesh=plan.grid.mesh, in_specs=(spec, groups_spec(plan)), out_specs=spec, check_vma=False,
    )  # fmt: skip
    return local(values, groups)
