"""Two lower bounds on the exposed communication of a step: by its links, and by the order of its forward pass.

    python -m tests.planner.links

Prints both bounds and the exposed time of the steps of docs/data/steps.csv with MeshSlice and Collective.

Links: the bytes that the products of a step communicate over the bandwidth of the links, without latency. Order: a norm
needs all features, and attention all queries, keys and values of all tokens. In the forward pass, collectives of the
activations of a product therefore overlap only with the multiplication of the same product; those of weights may
overlap with anything.
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
    """Lower bound on the seconds of a step in which the links of each mesh axis are busy."""

    row: float
    col: float

    def exposed(self, busy: float) -> float:
        """Lower bound on the exposed fraction of a step in which the device computes for `busy` seconds."""
        longest = max(self)
        return max(0.0, 1 - busy / longest)


def link_seconds(costed: Costed) -> LinkSeconds:
    """The bound by links of a plan without pipeline stages.

    A matrix that both gradients of a product need is gathered once. The output projection runs forward twice.
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
    """Seconds along (rows, columns) of the three GEMMs of one microbatch; `repeated`: with the first one twice."""
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
    """The bound by order, in seconds, with the planner's rate of products and the best slice count of each product."""
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
    """Lower bound on the exposed seconds of one collective of a product.

    No multiplication overlaps with the first slice of an all_gather (the last one of a reduce_scatter), nor a slice of
    the collective with the last (first) multiplication.
    """
    one = traffic / slices + latency
    return max(one, slices * one - computes * (1 - 1 / slices))


def bounds(row: dict[str, str]) -> tuple[LinkSeconds, float, float]:
    """(bound by links, seconds exposed by order, seconds of compute) of a compiled step."""
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
