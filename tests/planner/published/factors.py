"""Which terms of published TPU runs take longer than the cost model's schedule: factors by least squares.

python -m tests.planner.published.factors [FILE ...]    of the runs on TPUs in the files

A run's measured seconds are the sum of its terms without stragglers, each times a factor that all runs share. The
factors of small terms are kept near 1: as if one more run had each with the standard error of its term.
"""

import sys
from pathlib import Path

import numpy as np

from mstrain.planner.published.predict import Prediction, predict
from mstrain.planner.published.rows import read_rows

ROOT = Path(__file__).parents[3]
FILES = [str(ROOT / "tests" / "golden" / "published.json"), str(ROOT / "docs" / "data" / "published.json")]
GROUPS = {"products": 0.15, "attention": 0.3, "elementwise, update": 0.3, "collectives": 0.5, "offload": 0.5}
RUN_ERROR = 0.05  # of a measured run


def shares(prediction: Prediction) -> list[float]:
    """Seconds of the schedule over the measured step, by group; recomputation is divided among them."""
    costed = prediction.costed
    terms, again = costed.terms, costed.step.stages[0].repeated * costed.plan.microbatches
    measured = costed.seconds * prediction.ratio
    groups = (
        terms.products + again.gemm,
        terms.attention + again.attention + terms.context,
        terms.elementwise + again.elementwise + terms.update,
        terms.tensor_exposed + again.exposed + terms.gradient_sum + terms.messages,
        terms.offload,
    )
    return [seconds / measured for seconds in groups]


def main(files: list[str]) -> None:
    rows = [row for file in files for row in read_rows(file) if row.request.style.name == "maxtext"]
    parts = np.array([shares(predict(row)) for row in rows])
    near = np.diag(RUN_ERROR / np.array(list(GROUPS.values())))
    factors, *_ = np.linalg.lstsq(
        np.vstack([parts, near]), np.concatenate([np.ones(len(rows)), near.sum(axis=1)]), rcond=None
    )
    one = 1 / parts.sum(axis=1)
    for row, ratio in zip(rows, one):
        print(f"{row.name}: measured over scheduled {ratio:.2f}")
    print(f"one factor for all terms: {one.mean():.2f}, residual {100 * np.std(parts.sum(axis=1) * one.mean()):.1f} %")
    left = np.sqrt(np.mean((parts @ factors - 1) ** 2))
    named = ", ".join(f"{name} {factor:.2f}" for name, factor in zip(GROUPS, factors))
    print(f"a factor per term: {named}, residual {100 * left:.1f} %")


if __name__ == "__main__":
    main(sys.argv[1:] or FILES)
