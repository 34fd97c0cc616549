"""Exchange of tokens between the devices along mesh axis `expert`, each of which has a part of the experts.

A device sends each row of a token and an expert that it chose to the device of that expert, and receives its result.
Shapes are static and no token is dropped: rows are exchanged in rounds, in each at most `room` to every device, by a
plain all-to-all. Every slice of a device's tokens has one round, with a quarter more room than an even load needs; what
does not fit follows in as many further rounds as the most loaded pair of devices needs, none with a load that is about
even. Hence the memory of a round does not depend on the routing, and only its time does: with all tokens at one expert
a layer takes about as many rounds as there are parts of the experts, times the slices.

A ragged all-to-all moves a fifth less with an even load, but XLA has none for CPUs, and its buffers hold the worst
case.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from mstrain.gemm.copies import EXPERT
from mstrain.gemm.grouped import sum_choices
from mstrain.gemm.plan import Plan

ROUND = "round_of_slice"  # name of the products of a round of a slice, whose margin an even load leaves empty
FURTHER = "further_rounds"  # name of the loop over rounds behind those of slices, which an even load does not need
MARGIN = 1.25  # room of a round over what an even load needs
UNIT = 8  # rows of a tile, of which the room is a multiple


class Sent(NamedTuple):
    """The rows of one round on a device, of N choices, int32.

    Attributes:
      places: [N], the row of every choice; one behind all rows for a choice of another round.
      sources: [rows], the choice in every row; N for an empty row.
    """

    places: Any
    sources: Any


@dataclasses.dataclass(frozen=True)
class ExpertExchange:
    """Rounds of the exchange for products of `plan`.

    Attributes:
      plan: of the first product of an expert, whose input is exchanged.
      experts: number of all experts.
      chosen: experts that a token chooses, K.
      slices: parts of a device's tokens, each exchanged while another one is multiplied.
      tokens: of a device.
    """

    plan: Plan
    experts: int
    chosen: int
    slices: int
    tokens: int

    @property
    def parts(self) -> int:
        return self.plan.grid.expert_parts

    @property
    def experts_here(self) -> int:
        """Experts of a device."""
        return self.experts // self.parts

    @property
    def _most(self) -> int:
        """Choices of a slice that can be of one device."""
        return self.tokens // self.slices * min(self.chosen, self.experts_here)

    @property
    def room(self) -> int:
        """Rows that a device sends to each other one in a round."""
        even = math.ceil(MARGIN * self.tokens * self.chosen / (self.slices * self.parts))
        return min(self._most, math.ceil(even / UNIT) * UNIT)

    @property
    def rows(self) -> int:
        """Rows of a round on a device."""
        return self.room * self.parts

    @property
    def may_overflow(self) -> bool:
        """Whether some routing needs more rounds than there are slices."""
        return self.room < self._most

    def split(self, x, *, features: bool = False) -> tuple:
        """The slices of every device's rows of x: `features` of tokens, else one value for each of their choices."""
        spec = self.plan.input_layout.spec if features else P(self.plan.input_layout.tokens)
        cut = self._map(lambda x: tuple(jnp.split(x, self.slices)), spec, (spec,) * self.slices)
        return cut(x)

    def join(self, slices):
        """The inverse of `split`."""
        spec = self._spec(slices[0])
        return self._map(lambda *parts: jnp.concatenate(parts), (spec,) * self.slices, spec)(*slices)

    def assign(self, choices_TxK):
        """(row of every choice, numbered through all rounds, -1 without one; number of rounds behind those of slices).

        `choices_TxK`: experts of all tokens, int32, sharded as the tokens; `experts` for a choice without one.
        """
        tokens = self.plan.input_layout.tokens

        def local(choices):
            part_SxN = choices.reshape(self.slices, -1) // self.experts_here
            own = part_SxN[..., None] == jnp.arange(self.parts)
            rank = _rank(own, 1)
            late = (own & (rank >= self.room)[..., None]).reshape(-1, self.parts)
            late_rank = _rank(late, 0).reshape(rank.shape)
            turn = jnp.where(rank < self.room, jnp.arange(self.slices)[:, None], self.slices + late_rank // self.room)
            row = turn * self.rows + part_SxN * self.room + jnp.where(rank < self.room, rank, late_rank % self.room)
            rounds = lax.pmax(-(-jnp.max(jnp.sum(late, axis=0)) // self.room), tokens)
            return jnp.where(rank < 0, -1, row).reshape(choices.shape), rounds

        return self._map(local, P(tokens), (P(tokens), P()))(choices_TxK)

    def sent(self, rows_TxK, turn) -> Sent:
        """The rows of round `turn`, from those that `assign` gave to the choices of some tokens."""
        spec = P(self.plan.input_layout.tokens)

        def local(rows):
            places = rows.reshape(-1)
            places = jnp.where((places >= 0) & (places < self.rows), places, self.rows)
            none = jnp.full(self.rows, len(places), jnp.int32)
            return Sent(places, none.at[places].set(lax.iota(jnp.int32, len(places)), mode="drop"))

        return self._map(local, spec, Sent(spec, spec))(rows_TxK - turn * self.rows)

    def send(self, x, sent: Sent) -> Any:
        """Rows of x, one per token or per choice, on the devices of the experts; zeros in empty rows."""
        return _send(x, sent, self, len(sent.places) // len(x))

    def receive(self, y, sent: Sent) -> Any:
        """Sums of the results of each token's choices in a round, from y on the devices of the experts."""
        return _receive(y, sent, self)

    def scatter(self, x, sent: Sent):
        """`send` without derivative."""
        spec = self._spec(x)

        def local(x, sent):
            chosen = len(sent.places) // len(x)
            return self._swap(x.at[sent.sources // chosen].get(mode="fill", fill_value=0))

        return self._with(local, spec)(x, sent)

    def collect(self, y, sent: Sent, chosen: int):
        """The transpose of `scatter`, which sums the `chosen` rows of each token in float32."""
        spec = self._spec(y)

        def local(y, sent):
            return sum_choices(self._swap(y), sent.places.reshape(-1, chosen)).astype(y.dtype)

        return self._with(local, spec)(y, sent)

    def numbered_here(self, choices):
        """Experts of received rows as numbers of those of the device, `experts_here` for none (below 0)."""
        spec = self._spec(choices)

        def local(choices):
            return jnp.where(choices < 0, self.experts_here, choices - lax.axis_index(EXPERT) * self.experts_here)

        return self._map(local, spec, spec)(choices)

    def _swap(self, x):
        return lax.all_to_all(x, EXPERT, 0, 0, tiled=True)

    def _spec(self, x) -> P:
        """Of activations [rows, features], or of one value of each row [rows]."""
        layout = self.plan.input_layout
        return layout.spec if x.ndim == 2 else P(layout.tokens)

    def _with(self, local, spec: P):
        tokens = P(self.plan.input_layout.tokens)
        return self._map(local, (spec, Sent(tokens, tokens)), spec)

    def _map(self, local, in_specs, out_specs):
        mesh = self.plan.grid.mesh
        return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _rank(own, dim: int):
    """How many before it along `dim` have the same last index, from [..., parts] flags with one or none set; -1 where
    none is."""
    return jnp.sum(jnp.where(own, jnp.cumsum(own, dim, dtype=jnp.int32), 0), axis=-1) - 1


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _send(x, sent, exchange, chosen):
    del chosen
    return exchange.scatter(x, sent)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _receive(y, sent, exchange):
    return exchange.collect(y, sent, exchange.chosen)


# Each is the transpose of the other. JAX's own transpose of a gather of rows is a scatter, which TPUs do row by row.
_send.defvjp(
    lambda x, sent, exchange, chosen: (exchange.scatter(x, sent), sent),
    lambda exchange, chosen, sent, dy: (exchange.collect(dy, sent, chosen), None),
)
_receive.defvjp(
    lambda y, sent, exchange: (exchange.collect(y, sent, exchange.chosen), sent),
    lambda exchange, sent, dx: (exchange.scatter(dx, sent), None),
)
