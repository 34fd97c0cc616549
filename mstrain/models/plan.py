"""From what a person asked of the parallelism (`ParallelConfig`) to a plan for every product of a model (`ModelPlan`).

`make_plan` checks everything that needs no device time: spelling, divisibility, legal slice counts, options without
effect.
"""

import dataclasses
import functools
import itertools
import math

import numpy as np
from jax.sharding import AxisType, Mesh

from mstrain.gemm import Grid, LoweringOptions, Plan, PlanPair, find_algorithm, grid_of, legal_slices
from mstrain.hardware import Chip
from mstrain.hardware.constants import Constants
from mstrain.mesh import AXES, shape_of
from mstrain.models.auto import tune_products
from mstrain.models.config import ModelConfig
from mstrain.models.parallel import ParallelConfig, check_effect, layer_algorithms, parse_slices
from mstrain.models.products import ATTENTION, MLP, block_products

LANES = 128  # of a TPU's vector registers: the last dim of an array moves without a relayout in multiples of it
SLICES_WITHOUT_TUNING = 4  # auto takes the largest legal count up to this when there is no chip to tune for


@dataclasses.dataclass(frozen=True)
class BlockPlan:
    attention: PlanPair
    mlp: PlanPair

    @property
    def products(self) -> tuple[Plan, ...]:
        """In the order of `mstrain.models.products.block_products`."""
        return tuple(plan for pair in (self.attention, self.mlp) for plan in (pair.into, pair.out))

    @property
    def mesh(self) -> Mesh:
        return self.attention.grid.mesh


@dataclasses.dataclass(frozen=True)
class ModelPlan:
    """Plans of consecutive groups of equal layers, with their lengths, and of the output projection.

    `padded`: the vocabulary may grow by tokens that are never used; not so for canonical parameters.
    """

    groups: tuple[tuple[BlockPlan, int], ...]
    head: Plan
    padded: bool = True

    @property
    def mesh(self) -> Mesh:
        return self.head.grid.mesh

    @property
    def embedding_grid(self) -> Grid:
        return self.head.grid.swapped if self.head.dataflow == "rs" else self.head.grid

    def vocab_padding(self, vocab_size: int) -> int:
        """Tokens to add so that vocabulary shards are equal, and whole 128-wide lanes for large vocabularies."""
        if not self.padded:
            return 0
        unit = math.lcm(self.head.grid.num_rows, self.head.grid.num_cols)
        unit *= 128 if vocab_size >= 8192 else 1
        return -vocab_size % unit


def make_plan(
    parallel: ParallelConfig, model: ModelConfig, mesh: Mesh, microbatch: int, seq: int, chip: Chip | None = None,
    constants: Constants | None = None,
) -> ModelPlan:  # fmt: skip
    """Plans every product of `model` on `mesh`.

    Args:
      microbatch: sequences that go through the model at once, whole job.
      seq: tokens per sequence.
      chip: what MeshSlice's automatic dataflows and slice counts are tuned for; None takes the paper's rule, few
        slices.
      constants: of these devices, instead of those derived from the chip.

    Raises:
      ValueError: what is wrong and what to type instead.
    """
    data = mesh.shape["data"]
    if microbatch % data:
        raise ValueError(
            f"A microbatch of {microbatch} sequences does not divide over {data} data-parallel copies. "
            f"Type batch={math.ceil(microbatch / data) * data} (times accumulate=)."
        )
    planner = _Planner(parallel, model, mesh, microbatch // data, seq, chip, constants)
    algorithms = layer_algorithms(parallel, model.layers)
    check_effect(parallel, set(itertools.chain(*algorithms)))
    blocks = [planner.block(*names) for names in algorithms]
    groups = tuple((plan, len(list(equal))) for plan, equal in itertools.groupby(blocks))
    return ModelPlan(groups, planner.head(parallel.algorithm))


def describe_plan(plan: ModelPlan) -> str:
    """One line: which layers run which algorithm, dataflow and slice count."""
    parts, first = [], 0
    for block, count in plan.groups:
        halves = []
        for name, pair in (("attention", block.attention), ("mlp", block.mlp)):
            into, out = pair.into, pair.out
            slices = f" S={into.slices},{out.slices}" if into.kind.sliced else ""
            halves.append(f"{name} {into.algorithm} {into.dataflow},{out.dataflow}{slices}")
        layers = f"layer {first}" if count == 1 else f"layers {first}-{first + count - 1}"
        parts.append(f"{layers}: {'; '.join(halves)}")
        first += count
    return " | ".join(parts)


def chip_lowering(chip: Chip | None) -> LoweringOptions:
    """The options of the table of chips; the plain ones for an unknown chip."""
    return LoweringOptions(**chip.lowering) if chip else LoweringOptions()


@functools.cache
def canonical_plan(model: ModelConfig) -> ModelPlan:
    """Every parameter whole, in canonical order, all layers in one group: the form that checkpoints carry.

    Needs no device: the mesh is of this process's CPU, or absent when shapes alone are asked for.
    """
    import jax

    mesh = Mesh(np.array(jax.devices()[:1]).reshape((1,) * len(AXES)), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    return dataclasses.replace(make_plan(ParallelConfig("gspmd"), model, mesh, 1, 1), padded=False)


@dataclasses.dataclass(frozen=True)
class _Planner:
    parallel: ParallelConfig
    model: ModelConfig
    mesh: Mesh
    sequences: int  # of one data-parallel copy
    seq: int
    chip: Chip | None
    constants: Constants | None = None

    @functools.cached_property
    def tuned(self):
        """The tuner's choices for MeshSlice by product, empty without a chip to tune for."""
        shape = (self.mesh.shape["row"], self.mesh.shape["col"])
        return tune_products(
            self.model, self.parallel, shape, self.sequences * self.seq, self.chip, self.constants
        )

    def block(self, attention: str, mlp: str) -> BlockPlan:
        plan = BlockPlan(self._pair(attention, ATTENTION), self._pair(mlp, MLP))
        self._check_heads(plan.attention)
        return plan

    def head(self, algorithm: str) -> Plan:
        """The output projection: largest of its three matrices is the logits, which stay; tokens keep their order."""
        grid = grid_of(algorithm, self.mesh)
        swap = self._flow(algorithm, 1, 1, "attention in") == "rs"
        plan = Plan(algorithm, "rs" if swap else "os", grid)
        vocab_size = self.model.vocab_size or 1
        padded = vocab_size + ModelPlan((), plan).vocab_padding(vocab_size)
        plan.check(self.model.width, padded, self.sequences, "the output projection")
        if self.model.tied or swap:  # a shared table has one order, and loss and targets need tokens in theirs
            return plan
        return self._sliced(plan, self.model.width, padded, "the output projection")

    def _pair(self, algorithm: str, half: str) -> PlanPair:
        grid, lowering = grid_of(algorithm, self.mesh), chip_lowering(self.chip)
        first, last = (product for product in block_products(self.model) if product.half == half)
        into, out = (self._flow(algorithm, p.in_dim, p.out_dim, p.name) for p in (first, last))
        into_plan = Plan(algorithm, into, grid, lowering=lowering)
        out_plan = Plan(algorithm, out, grid.swapped if out == "rs" else grid, lowering=lowering)
        for segment in first.segments:
            if segment % grid.num_cols:
                raise ValueError(
                    f"{half}: {segment} features do not divide over the {grid.num_cols} columns of {algorithm} on "
                    f"mesh {shape_of(self.mesh)}. Choose another mesh= or other model sizes."
                )
        into_plan = self._sliced(into_plan, first.in_dim, first.out_dim, first.name)
        out_plan = self._sliced(out_plan, last.in_dim, last.out_dim, last.name)
        if into == out == "rs":  # one order of the sequences inside
            slices = min(into_plan.slices, out_plan.slices)
            into_plan, out_plan = (dataclasses.replace(p, slices=slices) for p in (into_plan, out_plan))
        pair = PlanPair(into_plan, out_plan)
        self._check_sequences(pair, half)
        return pair

    def _flow(self, algorithm: str, in_dim: int, out_dim: int, what: str) -> str:
        kind = find_algorithm(algorithm)
        if kind.only_dataflow:
            return kind.only_dataflow
        if self.parallel.dataflow != "auto":
            return self.parallel.dataflow
        if kind.sliced and what in self.tuned:
            return self.tuned[what].dataflow
        return "os" if out_dim > in_dim else "ls"

    def _sliced(self, plan: Plan, in_dim: int, out_dim: int, what: str) -> Plan:
        if plan.kind.sliced:
            if self.parallel.slices == "auto":
                legal = legal_slices(
                    plan.dataflow, in_dim, out_dim, self.sequences, plan.grid.num_rows, plan.grid.num_cols
                )
                slices = self._automatic_slices(legal, plan, in_dim, out_dim, what)
            else:
                slices = parse_slices(self.parallel.slices)
            plan = dataclasses.replace(plan, slices=slices)
        plan.check(in_dim, out_dim, self.sequences, what)
        return plan

    def _automatic_slices(self, legal: list[int], plan: Plan, in_dim: int, out_dim: int, what: str) -> int:
        """The tuner's slice count, or the nearest smaller one whose slices of features are whole lanes of a TPU."""
        if what not in self.tuned:
            most = min([SLICES_WITHOUT_TUNING, *(choice.slices for choice in self.tuned.values())])
            return max(s for s in legal if s <= most)
        fitting = [s for s in legal if s <= self.tuned[what].slices]
        sliced = {"os": in_dim, "ls": out_dim, "rs": 0}[plan.dataflow]  # tokens are cut between sequences
        pieces = sliced // math.lcm(plan.grid.num_rows, plan.grid.num_cols)
        aligned = [s for s in fitting if s > 1 and pieces // s % LANES == 0]
        return max(aligned or fitting)

    def _check_heads(self, pair: PlanPair) -> None:
        columns = pair.grid.num_cols
        for name, heads in (("heads", self.model.heads), ("num_kv_heads", self.model.num_kv_heads)):
            if heads % columns:
                fits = [c for c in range(1, heads + 1) if heads % c == 0]
                raise ValueError(
                    f"model.{name}={heads} does not divide over {columns} columns of {pair.into.algorithm}: attention "
                    f"works on whole heads. Choose a mesh= with a column count out of {fits}."
                )

    def _check_sequences(self, pair: PlanPair, half: str) -> None:
        inside, residual = (pair.grid.size(x.tokens[1:]) for x in (pair.inside, pair.residual))
        if half == ATTENTION and self.sequences % inside:
            raise ValueError(
                f"{self.sequences} sequences per data-parallel copy and microbatch do not divide over {inside} rows of "
                f"{pair.into.algorithm}: attention works on whole sequences. Type a batch= that is a multiple of "
                f"{inside * self.mesh.shape['data']} (times accumulate=)."
            )
        if self.sequences * self.seq % residual or self.sequences * self.seq % inside:
            raise ValueError(
                f"{self.sequences} x {self.seq} tokens do not divide over {max(residual, inside)} devices. "
                "Choose another batch= or seq=."
            )
