"""Two bounds on the exposed communication of a step: by its links, and by the order of its forward pass.

Links move what the products of a step communicate: bytes over bandwidth, no latency. The order is that of a step whose
products take all tokens at once: a norm needs all features, attention all queries, keys and values. So activations of a
product move beside its own multiplication and nothing else, in the forward pass; weights move at any time.

python -m tests.planner.links    steps of docs/data/steps.csv on two-dimensional grids: both bounds, exposed
"""

from typing import NamedTuple

from mstrain.parallel.product_cost import communication_terms
from mstrain.planner.cost import Costed
from mstrain.planner.plan import Product
from tests.docs.steps import STEP, name_of, read_steps, step_name
from tests.planner.steps import cost_of

BUSY = ("products_ms", "kernels_ms", "copies_ms", "other_ms")
GRIDS = ("meshslice", "collective")
MOST_SLICES = 16
HEAD = """| step | algorithm, mesh | links of rows, columns, ms | compute, ms | least exposed: links | order | exposed |
|---|---|---|---|---|---|---|"""


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


def in_order(costed: Costed) -> float:
    """Seconds that the forward pass exposes at least; products have the planner's rate and the best slice counts."""
    step, plan, total = costed.step, costed.plan, 0.0
    constants = step.at.constants
    for block, share in step.products.groups:
        for product in block:
            layout = product.layout
            rates = constants.along(layout.rows, layout.cols, product.turned)
            terms = {term.gemm: term for term in communication_terms(layout, rates)}[layout.dataflow.upper()]
            computes = layout.gemm_seconds(constants)
            total += share * min(
                exposed_in_slices(terms.traffic_col, terms.latency_col, computes, slices)
                for slices in range(1, MOST_SLICES + 1)
            )
    return plan.microbatches * step.request.model.layers * total


def exposed_in_slices(traffic: float, latency: float, computes: float, slices: int) -> float:
    """Seconds that a product exposes at least of one collective: nothing is multiplied beside the first slice that is
    gathered (the last that is scattered), and the links are busy until the last product (from the first one on)."""
    one = traffic / slices + latency
    return max(one, slices * one - computes * (1 - 1 / slices))


def bounds(row: dict[str, str]) -> tuple[LinkSeconds, float, float]:
    """Of a compiled step, seconds of the links, those that its order exposes, those in which the device computes."""
    costed = cost_of(row)
    assert costed is not None, "the planner prices these algorithms"
    return link_seconds(costed), in_order(costed), sum(float(row[name]) for name in BUSY) / 1e3


def main() -> None:
    print(HEAD)
    for row in (row for row in read_steps() if row["algorithm"] in GRIDS):
        links, waits, busy = bounds(row)
        least = f"{links.exposed(busy):.1%} | {waits / (busy + waits):.1%}"
        shares = f"{least} | {float(row['exposed_ms']) / float(row['ms']):.1%}"
        times = f"{1e3 * links.row:.0f}, {1e3 * links.col:.0f} | {1e3 * busy:.0f}"
        print(f"| {step_name(tuple(row[name] for name in STEP))} | {name_of(row)} | {times} | {shares} |")


if __name__ == "__main__":
    main()
