"""Equal layers are one scan: the program, and with it the time to compile it, does not grow with depth."""

import dataclasses

import jax
import jax.numpy as jnp

from mstrain.data import Batch
from mstrain.mesh import make_mesh, parse_mesh
from mstrain.models.config import ModelConfig
from mstrain.models.parallel import ParallelConfig
from mstrain.models.parameters import parameter_shapes
from mstrain.models.plan import make_plan
from mstrain.models.transformer import Transformer
from mstrain.program.step import mean_loss

MODEL = ModelConfig(layers=2, width=32, heads=4, vocab_size=64, context=16)


def operations(layers: int, rules: str | None = None) -> int:
    """Operations of the lowered loss and gradient of a model of so many layers."""
    model = dataclasses.replace(MODEL, layers=layers)
    mesh = make_mesh(parse_mesh("2x2"))
    module = Transformer(model, make_plan(ParallelConfig(layers=rules), model, mesh, 4, 16), 16)
    gradient = jax.jit(jax.grad(lambda params, tokens: mean_loss(module, params, Batch(tokens))))
    tokens = jax.ShapeDtypeStruct((4, 17), jnp.int32)
    return gradient.lower(parameter_shapes(module), tokens).as_text().count(" = ")


def test_program_does_not_grow_with_depth():
    assert operations(2) == operations(12)


def test_each_group_of_equal_layers_is_one_scan():
    assert operations(4, "2-:fsdp") == operations(12, "6-:fsdp") > operations(12)
