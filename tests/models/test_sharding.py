"""Weights and moments sharded over data-parallel copies."""

import pytest

from mstrain.mesh import make_mesh, parse_mesh
from mstrain.models.config import ModelConfig
from mstrain.models.plan import ParallelConfig, make_plan

MODEL = ModelConfig(layers=2, width=32, heads=4, mlp_dim=64, vocab_size=61, context=8)


def test_sharding_without_copies_is_refused_with_what_fits():
    with pytest.raises(ValueError, match="shard=optimizer has no effect: .* Type shard=none, or .*data axis"):
        make_plan(ParallelConfig(), MODEL, make_mesh(parse_mesh("2x4")), 8, 8, shard="optimizer")
