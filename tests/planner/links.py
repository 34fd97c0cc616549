"""The least time in which the links of a step move what its products communicate: bytes over bandwidth, no latency.

python -m tests.planner.links    steps of docs/data/steps.csv on two-dimensional grids: least exposed, exposed
"""

from typing import NamedTuple

from mstrain.parallel.product_cost import communication_terms
from mstrain.planner.cost import Costed
from mstrain.planner.plan import Product
from tests.docs.steps import STEP, name_of, read_steps, step_name
from tests.planner.steps import cost_of

BUSY = ("products_ms", "kernels_ms", "copies_ms", "other_ms")
GRIDS = ("meshslice", "collective")
HEAD = """| step | algorithm, mesh | links of rows, columns, ms | computes, ms | least exposed | exposed |
|---|---|---|---|---|---|"""


class LinkSeconds(NamedTuple):
    """Seconds of one step in which the links of each mesh axis are busy at least."""

    row: float
    col: float

    def exposed(self, busy: float) -> float:
        """Least share of the step that waits for links where the device computes for `busy` seconds."""
        longest = max(self)
        return max(0.0, 1 - busy / longest)


def link_seconds(costed: Costed) -> LinkSeconds:
    """The bound of a plan of train.py in one stage.

    Nothing is gathered twice for the two gradients of a product. The output projection runs forward twice.
    """
    step, plan = costed.step, costed.plan
    layers, total = step.request.model.layers, [0.0, 0.0]
    parts = [(product, layers * share) for block, share in step.products.groups for product in block]
    for product, count in [*parts, (step.products.head, 1)]:
        repeated = product is step.products.head or product.name in step.repeated[-1]
        for axis, seconds in enumerate(_product_seconds(costed, product, repeated)):
            total[axis] += plan.microbatches * count * seconds
    return LinkSeconds(*total)


def _product_seconds(costed: Costed, product: Product, repeated: bool) -> tuple[float, float]:
    """(rows, columns) of the mesh, for the three GEMMs of one microbatch, the first again if it is `repeated`."""
    pod, plan, layout = costed.step.request.pod, costed.plan, product.layout
    rates = pod.constants(plan.sizes, costed.step.request.dtype).along(layout.rows, layout.cols, product.turned)
    terms = {term.gemm: (term.traffic_row, term.traffic_col) for term in communication_terms(layout, rates)}
    row, col = (sum(ways) for ways in zip(*terms.values()))
    ahead = terms[layout.dataflow.upper()]
    row, col = row + repeated * ahead[0], col + repeated * ahead[1]
    if layout.dataflow == "ls":  # OS and RS of the gradients gather the same matrix along the columns
        col -= terms["OS"][1]
    elif layout.dataflow == "rs":  # LS and OS along the rows
        row -= terms["OS"][0]
    return (col, row) if product.turned else (row, col)


def bound(row: dict[str, str]) -> tuple[LinkSeconds, float]:
    """(seconds of the links, those in which the device computes) of a compiled step."""
    costed = cost_of(row)
    assert costed is not None, "the planner prices these algorithms"
    return link_seconds(costed), sum(float(row[name]) for name in BUSY) / 1e3


def main() -> None:
    print(HEAD)
    for row in (row for row in read_steps() if row["algorithm"] in GRIDS):
        links, busy = bound(row)
        shares = f"{links.exposed(busy):.1%} | {float(row['exposed_ms']) / float(row['ms']):.1%}"
        times = f"{1e3 * links.row:.0f}, {1e3 * links.col:.0f} | {1e3 * busy:.0f}"
        print(f"| {step_name(tuple(row[name] for name in STEP))} | {name_of(row)} | {times} | {shares} |")


if __name__ == "__main__":
    main()
