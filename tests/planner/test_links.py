"""The least time that links need for a step."""

import pytest

from tests.planner.links import LinkSeconds, link_seconds
from tests.planner.steps import cost_of

STEP = {
    "target": "v6e-256", "model": "gpt3_175b", "layers": "96", "batch": "128", "seq": "2048", "remat": "full",
    "algorithm": "meshslice", "mesh": "16x16", "shard": "none",
}  # fmt: skip


def test_every_product_moves_activations_between_columns():
    """Forward once for each of four products, again for three; two gradients of the two products into a half move one
    matrix each, those of the two out of it share one. The output projection moves four."""
    costed = cost_of(STEP)
    assert costed
    activation = 128 * 2048 / 16 * 12288 * 2 * 15 / 16 / (2 * 9e10)
    assert link_seconds(costed).col == pytest.approx((96 * 13 + 4) * activation)


def test_what_compute_cannot_hide():
    assert LinkSeconds(row=1.0, col=4.0).exposed(3.0) == 0.25
    assert LinkSeconds(row=1.0, col=2.0).exposed(3.0) == 0.0
