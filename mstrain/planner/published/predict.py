"""Predicts published runs with the cost model, for comparison with the measurements."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mstrain.planner.clock import divisors
from mstrain.planner.cost import Costed, cost_step
from mstrain.planner.plan import PodPlan
from mstrain.planner.published.rows import PublishedRow

MOST_CHUNKS = 256  # per stage
MOST_MICROBATCH = 64  # sequences; larger microbatches do not change the prediction
NEARLY = 1.02  # if no choice fits: largest memory of a choice over the least memory of all choices


@dataclass(frozen=True)
class Prediction:
    """The prediction of a row; `costed` has the microbatch and interleaving that the row states or the model chose."""

    row: PublishedRow
    costed: Costed

    @property
    def tokens_per_second(self) -> float:
        """Predicted tokens/s per device."""
        return self.row.request.tokens / self.row.request.pod.devices / self.costed.seconds

    @property
    def microbatch(self) -> int:
        """Sequences of one microbatch on one replica."""
        return self.costed.plan.sequences(self.row.request.batch)

    def utilization(self, attention: str = "full", one_hot: bool = False) -> float:
        """Predicted MFU, a fraction of the peak; `attention` is the convention for its FLOPs, full or causal.

        With `one_hot`, the FLOPs of a one-hot embedding are included if the execution style has one.
        """
        request, extra = self.row.request, 0.0
        if one_hot and request.style.one_hot:
            extra = 6.0 * request.model.width * request.model.known_vocab_size
        fraction = request.utilization(self.costed.seconds, attention, extra)
        assert fraction is not None, "reading a row checks that its chip has a peak"
        return fraction

    @property
    def compared(self) -> tuple[str, float, float]:
        """(unit, predicted, measured); MFU is a fraction."""
        if self.row.tokens_per_second is not None:
            return "tokens/s", self.tokens_per_second, self.row.tokens_per_second
        assert self.row.mfu is not None, "a row has one or the other"
        return "MFU", self.utilization(one_hot=True), self.row.mfu

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        _, predicted, measured = self.compared
        return predicted / measured


def predict(row: PublishedRow) -> Prediction:
    """Predicts a row; a microbatch or interleaving that it leaves open is the fastest legal one that fits.

    If none fits by the memory model, the fastest of those that need the least memory is taken, because the run did fit.
    """
    costs = [costed for plan in _choices(row) if (costed := cost_step(row.request, plan))]
    least = min(costed.fullest.total for costed in costs)
    held = [costed for costed in costs if costed.fits] or [c for c in costs if c.fullest.total <= NEARLY * least]
    return Prediction(row, min(held, key=lambda costed: costed.seconds))


def _choices(row: PublishedRow) -> Iterator[PodPlan]:
    """The plans of a row, with every microbatch and interleaving that it leaves open."""
    plan, layers = row.plan, row.request.model.layers
    share, stages = row.request.batch // plan.data, plan.pipeline
    counts = [plan.microbatches]
    if "microbatch" in row.search:
        counts = [count for count in divisors(share) if share // count <= MOST_MICROBATCH]
    chunks = [plan.interleave]
    if "interleave" in row.search:
        per_stage = -(-layers // stages)
        chunks = [n for n in divisors(per_stage) if n <= min(MOST_CHUNKS, layers // stages)] if stages > 1 else [1]
    for count in reversed(counts):
        for interleave in chunks:
            if interleave == 1 or count % stages == 0:
                yield replace(plan, microbatches=count, interleave=interleave)
