"""Lower bounds on the exposed communication of a step: by its links, and by the order of its forward pass."""

import pytest

from tests.docs.steps import read_steps
from tests.planner.links import GRIDS, LinkSeconds, bounds, exposed_in_slices, in_order, link_seconds
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


def test_slices_of_a_product_hide_behind_its_own_multiplication():
    """Fast links expose the first slice, slow ones what is left when all slices but the last are multiplied."""
    assert exposed_in_slices(traffic=4.0, latency=0.5, computes=20.0, slices=4) == 1.5
    assert exposed_in_slices(traffic=16.0, latency=0.5, computes=8.0, slices=4) == 4 * 4.5 - 6.0
    assert exposed_in_slices(traffic=4.0, latency=0.5, computes=8.0, slices=1) == 4.5


def test_the_order_of_the_forward_pass_exposes_what_its_two_halves_wait_for():
    """Of GPT-3 on 16x16 chips of v6e, whose links need longer than its multiplications, in 1 to 16 slices."""
    costed = cost_of(STEP)
    assert costed
    rate = costed.step.at.constants.flops
    tokens, width = 128 * 2048 / 16, 12288
    traffic = tokens * width * 2 * 15 / 16 / (2 * 9e10)
    seconds = 0.0
    for wide, launch in ((3, 13e-6), (1, 26e-6), (4, 13e-6), (4, 26e-6)):
        computes = 2 * tokens * width * wide * width / 16 / rate
        each = launch + 15 * 5e-6
        seconds += min(exposed_in_slices(traffic, each, computes, slices) for slices in range(1, 17))
    assert in_order(costed) == pytest.approx(96 * seconds, rel=1e-6)


@pytest.mark.parametrize(
    "row",
    [row for row in read_steps() if row["algorithm"] in GRIDS],
    ids=lambda row: "-".join(row[name] for name in ("target", "model", "batch", "remat", "algorithm", "mesh")),
)
def test_no_compiled_step_exposes_less_than_both_bounds(row):
    links, waits, busy = bounds(row)
    exposed = float(row["exposed_ms"]) / 1e3
    assert waits <= exposed
    assert links.exposed(busy) <= exposed / (exposed + busy)
