"""What the cost model says of a published run, beside what was measured."""

from dataclasses import dataclass, replace

from mstrain.hardware import mfu
from mstrain.models.flops import training_flops_per_token
from mstrain.planner.published.rows import PublishedRow
from mstrain.planner.stated.cost import StatedCost, cost_step
from mstrain.planner.stated.memory import fits, step_bytes
from mstrain.planner.stated.plan import StatedStep

MOST_CHUNKS = 256  # of a stage
MOST_MICROBATCH = 64  # sequences; larger ones change nothing that the model knows
NEARLY = 1.02  # of the least memory


@dataclass(frozen=True)
class Prediction:
    """One row; `step` has the microbatch and interleaving that the model chose where the row leaves them open."""

    row: PublishedRow
    step: StatedStep
    cost: StatedCost

    @property
    def tokens_per_second(self) -> float:
        """Predicted, a device."""
        return self.step.batch * self.step.seq / self.step.fabric.devices / self.cost.seconds

    def utilization(self, attention: str) -> float:
        """Predicted model FLOP/s over peak; `attention` is the convention, full or causal."""
        return self._share(training_flops_per_token(self.step.model, self.step.seq, attention))

    def _share(self, flops_per_token: float) -> float:
        """Of the peak, which every row has: reading it checks that."""
        step = self.step
        flops = flops_per_token * step.batch * step.seq
        share = mfu(flops, self.cost.seconds, step.fabric.devices, step.fabric.chip.peak(step.dtype))
        assert share is not None
        return share

    @property
    def published_mfu(self) -> float:
        """Predicted, full attention; a one-hot embedding counts where the style multiplies it."""
        step, model = self.step, self.step.model
        flops = training_flops_per_token(model, step.seq)
        if step.plan.style.one_hot:
            flops += 6 * model.width * (model.vocab_size or 0)
        return self._share(flops)

    @property
    def compared(self) -> tuple[str, float, float]:
        """(unit, predicted, measured)."""
        if self.row.tokens_per_second is not None:
            return "tokens/s", self.tokens_per_second, self.row.tokens_per_second
        assert self.row.mfu is not None, "a row has one or the other"
        return "MFU", self.published_mfu, self.row.mfu

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        _, predicted, measured = self.compared
        return predicted / measured


def predict(row: PublishedRow) -> Prediction:
    """The row as stated; microbatch and interleaving that it leaves open are the fastest legal ones that fit.

    Where none fits by the model's own count of memory, those that need least are taken: the run did fit.
    """
    steps = list(_choices(row))
    held = [step for step in steps if fits(step)]
    if not held:
        least = min(map(step_bytes, steps))
        held = [step for step in steps if step_bytes(step) <= NEARLY * least]
    costs = [(cost_step(step), step) for step in held]
    cost, step = min(costs, key=lambda pair: pair[0].seconds)
    return Prediction(row, step, cost)


def _choices(row: PublishedRow):
    """The steps that the row allows."""
    plan, step = row.step.plan, row.step
    share, stages = step.batch // plan.degrees.data, plan.degrees.pipeline
    sizes = [plan.microbatch]
    if "microbatch" in row.search:
        sizes = [size for size in range(1, min(share, MOST_MICROBATCH) + 1) if share % size == 0]
    chunks = [plan.interleave]
    if "interleave" in row.search:
        per_stage = -(-step.model.layers // stages)
        most = min(per_stage, MOST_CHUNKS) if stages > 1 else 1
        chunks = [count for count in range(1, most + 1) if per_stage % count == 0]
    for size in sizes:
        for count in chunks:
            if count == 1 or (share // size) % stages == 0:
                yield replace(step, plan=replace(plan, microbatch=size, interleave=count))
