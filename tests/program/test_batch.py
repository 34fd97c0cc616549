"""Masks and segments reach the loss: packed documents train as if alone, on any mesh and number of microbatches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mstrain.data import Batch
from mstrain.mesh import make_mesh, parse_mesh
from mstrain.models.config import ModelConfig
from mstrain.models.parallel import ParallelConfig
from mstrain.models.parameters import init_parameters
from mstrain.models.plan import make_plan
from mstrain.models.transformer import Transformer
from mstrain.program.inference import loss_program
from mstrain.program.step import gradients

SEQ, ROWS = 16, 4
LENGTHS = ((5, 11), (16,), (3, 6, 4), (9,))  # documents of each row; the rest is padding


def documents():
    rng = np.random.default_rng(3)
    return [[rng.integers(1, 64, length + 1) for length in row] for row in LENGTHS]


def row_of(docs):
    """(tokens [T+1], segments [T], mask [T]): the last token of a document is a target, never an input."""
    inputs = np.concatenate([doc[:-1] for doc in docs])
    targets = np.concatenate([doc[1:] for doc in docs])
    segments = np.concatenate([np.full(len(doc) - 1, i + 1) for i, doc in enumerate(docs)])
    short = SEQ - len(inputs)
    return [np.pad(x, (0, short)) for x in (inputs, targets, segments)]


def packed(position: str, mesh: str, accumulate: int):
    """(module, parameters, batch, mask): all documents packed in four rows."""
    model = ModelConfig(layers=2, width=32, heads=4, vocab_size=64, context=SEQ, position=position)
    plan = make_plan(ParallelConfig(), model, make_mesh(parse_mesh(mesh)), ROWS // accumulate, SEQ)
    module = Transformer(model, plan, SEQ)
    inputs, targets, segments = map(np.stack, zip(*map(row_of, documents()), strict=True))
    # Targets inside a document follow their inputs, so one array of T + 1 tokens holds both but at document ends.
    tokens = np.concatenate([inputs, targets[:, -1:]], axis=1)
    mask = (segments > 0) & (tokens[:, 1:] == targets)
    batch = Batch(tokens, segments, mask)
    batch = jax.tree.map(lambda x: jnp.asarray(x).reshape(accumulate, -1, x.shape[1]), batch)
    return module, init_parameters(module, 0), batch, mask


@functools.cache
def loss_and_gradients(position: str, mesh: str, accumulate: int):
    """Of all documents, with the mask of the first of each row's tokens."""
    module, params, batch, mask = packed(position, mesh, accumulate)
    (loss, *_), grads = jax.jit(functools.partial(gradients, module))(params, batch)
    return float(loss), float(jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))), mask


@pytest.mark.parametrize("position", ["learned", "rotary"])
def test_packed_documents_train_as_if_alone(position):
    loss, norm, mask = loss_and_gradients(position, "1x1", 1)
    model = ModelConfig(layers=2, width=32, heads=4, vocab_size=64, context=SEQ, position=position)
    module = Transformer(model, make_plan(ParallelConfig(), model, make_mesh(parse_mesh("1x1")), 1, SEQ), SEQ)
    params, total = init_parameters(module, 0), 0.0
    apply = jax.jit(lambda x, y: module.apply({"params": params}, x, y, method="loss"))
    for row, docs in enumerate(documents()):
        place = 0
        for doc in docs:
            length = len(doc) - 1
            padded = np.pad(doc, (0, SEQ - length))
            losses = np.asarray(apply(padded[:-1], padded[1:]))[:length]
            total += losses[mask[row, place : place + length]].sum()
            place += length
    np.testing.assert_allclose(loss, total / mask.sum(), rtol=1e-5)


@pytest.mark.parametrize("mesh, accumulate", [("1x1", 2), ("2x2x2", 1), ("2x2", 2)])
def test_masked_means_do_not_depend_on_mesh_or_microbatches(mesh, accumulate):
    want, got = loss_and_gradients("learned", "1x1", 1), loss_and_gradients("learned", mesh, accumulate)
    np.testing.assert_allclose(got[:2], want[:2], rtol=1e-5)


def test_the_validation_loss_weighs_every_target_alike():
    """Two microbatches with unequal numbers of targets."""
    module, params, batch, _ = packed("learned", "1x1", 2)
    loss, targets = jax.jit(loss_program(module, batch).function)(params, batch)
    np.testing.assert_allclose(loss, loss_and_gradients("learned", "1x1", 1)[0], rtol=1e-5)
    assert targets == batch.mask.sum() / 2
