"""Sizes of a model: which follow a change of width and heads, which stay, and which are refused."""

import pytest

from mstrain.models.config import ModelConfig


@pytest.mark.parametrize(
    ("given", "changes", "expected"),
    [
        ({}, {"width": 512}, (8, 64, 2048)),
        ({}, {"heads": 4}, (4, 64, 1024)),
        ({}, {"width": 512, "mlp_dim": 96}, (8, 64, 96)),
        ({"num_kv_heads": 2, "mlp_dim": 100}, {"width": 512, "heads": 4}, (2, 128, 100)),
    ],
)
def test_derived_sizes_follow_unless_they_were_given(given, changes, expected):
    model = ModelConfig(**given).resized(**changes)
    assert (model.num_kv_heads, model.head_dim, model.mlp_dim) == expected


@pytest.mark.parametrize("sizes", [{"head_dim": 9}, {"head_dim": 8, "rotary_fraction": 0.1}])
def test_rotary_positions_rotate_an_even_number_of_features_above_zero(sizes):
    with pytest.raises(ValueError, match="2 or more, not [09]: .* Set model.head_dim"):
        ModelConfig(position="rotary", **sizes)
