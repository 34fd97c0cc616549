"""The programs that use a model without training it: validation loss, and text in two parts, prefill and decode."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from mstrain.checks import at_least
from mstrain.data import Batch
from mstrain.layers.past import KeysValues, Past
from mstrain.models.decoding import past_shapes
from mstrain.models.parameters import parameter_shapes, parameter_shardings
from mstrain.models.transformer import Transformer
from mstrain.program.program import Program, abstract
from mstrain.program.step import apply, mean_loss, num_targets


@dataclasses.dataclass(frozen=True)
class Draw:
    """How the next token is chosen from the logits.

    Attributes:
      temperature: divides the logits; 0 takes the most likely token.
      top_k: chooses among so many most likely tokens; 0 for all.
      top_p: chooses among the fewest most likely tokens whose probabilities add up to this; 1 for all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        at_least("", self, temperature=0, top_k=0)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} is not above 0 and up to 1. Type top_p=1 for all tokens.")

    def __call__(self, logits_BxV, keys_B):
        """Tokens int32 [B] from float32 logits; `keys_B` are random keys."""
        if not self.temperature:
            return jnp.argmax(logits_BxV, axis=-1).astype(jnp.int32)
        logits = logits_BxV / self.temperature
        if 0 < self.top_k < logits.shape[1]:
            least = jax.lax.top_k(logits, self.top_k)[0][:, -1:]
            logits = jnp.where(logits < least, -jnp.inf, logits)
        if self.top_p < 1:
            falling = jnp.sort(logits, axis=-1, descending=True)
            shares = jax.nn.softmax(falling, axis=-1)
            within = jnp.cumsum(shares, axis=-1) - shares < self.top_p
            least = jnp.min(jnp.where(within, falling, jnp.inf), axis=-1, keepdims=True)
            logits = jnp.where(logits < least, -jnp.inf, logits)
        return jax.vmap(jax.random.categorical)(keys_B, logits).astype(jnp.int32)


def loss_program(module: Transformer, batch: Batch) -> Program:
    """(mean loss in nats, mean number of targets of a microbatch) from (parameters, batch); `batch` is abstract."""

    def loss(params, batch: Batch):
        share = num_targets(batch) / batch.tokens.shape[0]
        count = None if batch.mask is None else share
        return jnp.mean(jax.lax.map(lambda batch: mean_loss(module, params, batch, count), batch)), share

    name = f"validation loss of {module.model.name}"
    return Program(name, loss, (_abstract_parameters(module), batch), module.plan.algorithm)


def row_losses_program(module: Transformer, batch: Batch) -> Program:
    """(sum of losses in nats, number of targets) of every sequence, float32 [A, B] each, replicated.

    From (parameters, batch); `batch` is abstract and has a mask.
    """

    def losses(params, batch: Batch):
        inputs, targets = batch.tokens[:, :-1].reshape(-1), batch.tokens[:, 1:].reshape(-1)
        segments = None if batch.segments is None else batch.segments.reshape(-1)
        found = apply(module, params, inputs, targets, segments, method="loss").reshape(batch.mask.shape)
        return jnp.sum(jnp.where(batch.mask, found, 0), axis=1), jnp.sum(batch.mask, axis=1, dtype=jnp.float32)

    def each(params, batch: Batch):
        sums = jax.lax.map(lambda batch: losses(params, batch), batch)
        return jax.lax.with_sharding_constraint(sums, module.plan.head.grid.sharding(P()))

    name = f"losses of {module.model.name}"
    return Program(name, each, (_abstract_parameters(module), batch), module.plan.algorithm)


def prefill_program(module: Transformer, sequences: int, slots: int, draw: Draw) -> Program:
    """Reads prompts of up to `module.seq` tokens and draws the token after each.

    From (parameters, tokens [sequences, seq] int32, starts [sequences], rows [sequences], seed) to (next tokens
    [sequences], keys and values with `slots` slots of which the first seq are filled). Prompts end in the last slot;
    `starts` are their first ones. A token depends on the seed, its position and the number in `rows` only, not on the
    other sequences. All but parameters, keys and values are replicated. `module` is a `decoding_module`.
    """
    mesh, empty = module.plan.mesh, past_shapes(module, sequences, 0)

    def prefill(params, tokens_BxT, starts_B, rows_B, seed):
        past = Past(_zeros(empty), jnp.int32(0), starts_B)
        logits, new = apply(module, params, tokens_BxT, past, method="extend")
        new = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, slots - module.seq), (0, 0), (0, 0))), new)
        new = jax.lax.with_sharding_constraint(new, jax.tree.map(lambda x: x.sharding, empty))
        return _drawn(draw, logits, module, seed, rows_B, module.seq - starts_B), new

    shapes = (sequences, module.seq), (sequences,), (sequences,), ()
    arguments = (_abstract_parameters(module), *(abstract(shape, jnp.int32, mesh, P()) for shape in shapes))
    return Program(f"prefill of {module.model.name}", prefill, arguments, module.plan.algorithm)


def decode_program(module: Transformer, sequences: int, slots: int, draw: Draw) -> Program:
    """Draws one more token for every sequence.

    From (parameters, keys and values, tokens [sequences] of slot `slot`, slot, starts, rows, seed), as in
    `prefill_program`, to (next tokens, keys and values, slot + 1); it donates keys and values. `module.seq` is 1.
    """
    assert module.seq == 1
    mesh, kept = module.plan.mesh, past_shapes(module, sequences, slots)

    def decode(params, kept, tokens_B, slot, starts_B, rows_B, seed):
        logits, new = apply(module, params, tokens_B[:, None], Past(kept, slot, starts_B), method="extend")

        def insert(x_LxBxSxKxH, new):
            return jax.lax.dynamic_update_slice_in_dim(x_LxBxSxKxH, new, slot, axis=2)

        kept = jax.tree.map(insert, kept, new)
        return _drawn(draw, logits, module, seed, rows_B, slot + 1 - starts_B), kept, slot + 1

    small = [abstract(shape, jnp.int32, mesh, P()) for shape in ((sequences,), (), (sequences,), (sequences,), ())]
    replicated = small[0].sharding
    shardings = (replicated, jax.tree.map(lambda x: x.sharding, kept), replicated)
    function = jax.jit(decode, donate_argnums=1, out_shardings=shardings)
    arguments = (_abstract_parameters(module), kept, *small)
    return Program(f"decode of {module.model.name}", function, arguments, module.plan.algorithm)


def _drawn(draw: Draw, logits_BxV, module: Transformer, seed, rows_B, positions_B):
    """The token at `positions_B` of each sequence, replicated."""
    logits_BxV = jax.lax.with_sharding_constraint(logits_BxV, module.plan.head.grid.sharding(P()))
    key = jax.random.key(seed)
    keys_B = jax.vmap(lambda row, place: jax.random.fold_in(jax.random.fold_in(key, row), place))(rows_B, positions_B)
    return draw(logits_BxV, keys_B)


def _zeros(shapes: tuple[KeysValues, ...]) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def _abstract_parameters(module: Transformer):
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        parameter_shapes(module),
        parameter_shardings(module),
    )
