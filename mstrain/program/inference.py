"""The programs that use a model without training it: validation loss and text."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from mstrain.data import Batch
from mstrain.models.parameters import parameter_shapes, parameter_shardings
from mstrain.models.transformer import Transformer
from mstrain.program.program import Program, abstract
from mstrain.program.step import apply, mean_loss, num_targets


def loss_program(module: Transformer, batch: Batch) -> Program:
    """(mean loss in nats, mean number of targets of a microbatch) from (parameters, batch); `batch` is abstract."""

    def loss(params, batch: Batch):
        share = num_targets(batch) / batch.tokens.shape[0]
        count = None if batch.mask is None else share
        return jnp.mean(jax.lax.map(lambda batch: mean_loss(module, params, batch, count), batch)), share

    name = f"validation loss of {module.model.name}"
    return Program(name, loss, (_abstract_parameters(module), batch), module.plan.algorithm)


def sampling_program(module: Transformer, sequences: int, begin: int, end: int, temperature: float) -> Program:
    """Replaces tokens `begin` to `end` of every sequence by a continuation of those before.

    From (parameters, tokens [sequences, seq] int32, seed) to tokens; all but the parameters are replicated. Every step
    runs the whole sequence, so no cache is needed. With temperature 0 each token is the most likely one.
    """
    mesh = module.plan.mesh

    def generate(params, tokens_BxT, seed):
        key = jax.random.key(seed)

        def append(place, tokens_BxT):
            logits = apply(module, params, tokens_BxT.reshape(-1), method="__call__")
            logits = logits.reshape(*tokens_BxT.shape, -1)[:, place - 1]
            if temperature:
                chosen = jax.random.categorical(jax.random.fold_in(key, place), logits / temperature)
            else:
                chosen = jnp.argmax(logits, axis=-1)
            return tokens_BxT.at[:, place].set(chosen.astype(jnp.int32))

        tokens = jax.lax.fori_loop(begin, end, append, tokens_BxT)
        return jax.lax.with_sharding_constraint(tokens, module.plan.head.grid.sharding(P()))

    tokens, seed = (abstract(shape, jnp.int32, mesh, P()) for shape in ((sequences, module.seq), ()))
    arguments = (_abstract_parameters(module), tokens, seed)
    return Program(f"sample of {module.model.name}", generate, arguments, module.plan.algorithm)


def _abstract_parameters(module: Transformer):
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        parameter_shapes(module),
        parameter_shardings(module),
    )
