"""Continues a prompt with the trained model, by the very forward pass that was trained."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from mstrain.models.plan import make_plan
from mstrain.models.transformer import Transformer
from mstrain.training.run import Run


def sample(run: Run, params) -> str | None:
    """The continuation of `sample.prompt`, or None when none is wanted or tokens stand for no text."""
    options, tokenizer = run.config.sample, run.corpus.tokenizer
    if not options.tokens or tokenizer is None:
        return None
    prompt = np.asarray(tokenizer.encode(options.prompt), np.int32)[: run.config.seq - 1]
    if not len(prompt):
        prompt = np.array([tokenizer.eod or 0], np.int32)
    module, sequences = _smallest(run)
    end = min(len(prompt) + options.tokens, run.config.seq)
    tokens = np.zeros((sequences, run.config.seq), np.int32)
    tokens[:, : len(prompt)] = prompt
    generate = jax.jit(_generator(module, options.temperature), static_argnums=(2, 3))
    tokens = generate(params, tokens, len(prompt), end, jax.random.key(run.config.seed))
    return tokenizer.decode(np.asarray(tokens.addressable_data(0))[0, :end])


def _generator(module: Transformer, temperature: float):
    """Appends tokens one by one; each step runs the whole sequence: no cache and no second model needed."""

    def generate(params, tokens_BxT, begin, end, key):
        def append(place, tokens_BxT):
            logits = module.apply({"params": params}, tokens_BxT.reshape(-1))
            logits = logits.reshape(*tokens_BxT.shape, -1)[:, place - 1, : module.model.vocabulary]
            logits = logits.astype(jnp.float32)
            if temperature:
                chosen = jax.random.categorical(jax.random.fold_in(key, place), logits / temperature)
            else:
                chosen = jnp.argmax(logits, axis=-1)
            return tokens_BxT.at[:, place].set(chosen.astype(jnp.int32))

        tokens = jax.lax.fori_loop(begin, end, append, tokens_BxT)
        return jax.lax.with_sharding_constraint(tokens, module.plan.head.grid.sharding(jax.P()))

    return generate


def _smallest(run: Run) -> tuple[Transformer, int]:
    """The model planned for as few sequences as its mesh allows with the parameters stored as they are."""
    module, microbatch = run.module, run.config.batch // run.config.accumulate
    for sequences in range(1, microbatch):
        try:
            mesh = module.plan.mesh
            plan = make_plan(run.config.parallel, module.model, mesh, sequences, module.seq, run.chip)
        except ValueError:  # does not divide over the mesh
            continue
        if plan == module.plan:
            return dataclasses.replace(module, plan=plan), sequences
    return module, microbatch
