"""Fits, by least squares, a factor for each term of the cost model to the measured times of runs on TPUs (MaxText).

    python -m tests.planner.published.factors [FILE ...]

The measured time of a run is approximated by the sum of its predicted terms, without stragglers, each multiplied by a
factor that is the same for all runs. The fit keeps factors near 1 by one additional equation per term, with weight
RUN_ERROR / (standard error of the term).
"""

import sys
from pathlib import Path

import numpy as np

from mstrain.planner.published.predict import Prediction, predict
from mstrain.planner.published.rows import read_rows

ROOT = Path(__file__).parents[3]
FILES = [str(ROOT / "tests" / "golden" / "published.json"), str(ROOT / "docs" / "data" / "published.json")]
# Groups of terms, with their standard errors.
GROUPS = {"products": 0.15, "attention": 0.3, "elementwise, update": 0.3, "collectives": 0.5, "offload": 0.5}
RUN_ERROR = 0.05  # standard error of a measured run


def shares(prediction: Prediction) -> list[float]:
    """Predicted seconds / measured seconds of the step, by group; a group includes its recomputation."""
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
        print(f"{row.name}: measured / predicted time without stragglers {ratio:.2f}")
    spread = 100 * np.std(parts.sum(axis=1) * one.mean())
    print(f"same factor for all terms: {one.mean():.2f}, residual {spread:.1f} % of the measured time")
    left = np.sqrt(np.mean((parts @ factors - 1) ** 2))
    named = ", ".join(f"{name} {factor:.2f}" for name, factor in zip(GROUPS, factors))
    print(f"one factor per term: {named}, residual {100 * left:.1f} % of the measured time")


if __name__ == "__main__":
    main(sys.argv[1:] or FILES)
