"""Makes the plan of every product of a model (`ModelPlan`) from the user's `ParallelConfig`.

`make_plan` runs all checks that need no device: names, divisibility, legal slice counts, options without effect.
"""

import dataclasses
import functools
import itertools
import math

import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from mstrain.gemm import Grid, LoweringOptions, Plan, PlanPair, find_algorithm, grid_of, legal_slices
from mstrain.hardware import Chip
from mstrain.hardware.constants import Constants
from mstrain.mesh import AXES, shape_of
from mstrain.models.auto import tune_products
from mstrain.models.config import ModelConfig
from mstrain.models.parallel import ParallelConfig, check_effect, layer_algorithms, parse_slices
from mstrain.models.products import ATTENTION, MLP, block_products
from mstrain.models.sharding import check_shard

LANES = 128  # of a TPU's vector registers; slices of the last dim in multiples of it need no relayout
SLICES_WITHOUT_TUNING = 4  # without a known chip, auto takes the largest legal slice count up to this


@dataclasses.dataclass(frozen=True)
class BlockPlan:
    """Plans of the two halves of a block."""

    attention: PlanPair
    mlp: PlanPair

    @property
    def products(self) -> tuple[Plan, ...]:
        """The four plans in the order of `mstrain.models.products.block_products`."""
        return tuple(plan for pair in (self.attention, self.mlp) for plan in (pair.into, pair.out))

    @property
    def mesh(self) -> Mesh:
        """The mesh of devices; plans on an abstract mesh have none."""
        return _with_devices(self.attention.grid.mesh)

    @property
    def algorithm(self) -> str | None:
        """The algorithm of all products; None where there are several."""
        return _sole({plan.algorithm for plan in self.products})


@dataclasses.dataclass(frozen=True)
class ModelPlan:
    """Plans of consecutive groups of equal layers with their lengths, and of the output projection.

    `padded`: whether the vocabulary is padded to equal shards; False for canonical parameters.
    `shard`: one of `mstrain.models.sharding.SHARD`.
    """

    groups: tuple[tuple[BlockPlan, int], ...]
    head: Plan
    padded: bool = True
    shard: str = "none"

    @property
    def mesh(self) -> Mesh:
        """The mesh of devices; plans on an abstract mesh have none."""
        return _with_devices(self.head.grid.mesh)

    @property
    def algorithm(self) -> str | None:
        """The algorithm of all products of the layers; None where there are several."""
        return _sole({block.algorithm for block, _ in self.groups})

    @property
    def embedding_grid(self) -> Grid:
        return self.head.grid.swapped if self.head.dataflow == "rs" else self.head.grid

    def vocab_padding(self, vocab_size: int) -> int:
        """Number of tokens that pad the vocabulary to equal shards, in multiples of 128 for large vocabularies."""
        if not self.padded:
            return 0
        unit = math.lcm(self.head.grid.num_rows, self.head.grid.num_cols)
        unit *= LANES if vocab_size >= 8192 else 1
        return -vocab_size % unit


def _sole(names: set[str | None]) -> str | None:
    return names.pop() if len(names) == 1 else None


def _with_devices(mesh: Mesh | AbstractMesh) -> Mesh:
    assert isinstance(mesh, Mesh), f"{mesh} has no devices"
    return mesh


def make_plan(
    parallel: ParallelConfig, model: ModelConfig, mesh: Mesh | AbstractMesh, microbatch: int, seq: int,
    chip: Chip | None = None, constants: Constants | None = None, shard: str = "none",
) -> ModelPlan:  # fmt: skip
    """Plans every product of `model` on `mesh`.

    Args:
      microbatch: sequences per microbatch of the whole job.
      seq: tokens per sequence.
      chip: the chip for which MeshSlice's automatic dataflows and slice counts are tuned; None takes the paper's rule
        and few slices.
      constants: measured constants that replace those derived from the chip.
      shard: what data-parallel copies share, one of `mstrain.models.sharding.SHARD`.

    Raises:
      ValueError: the plan is illegal; the message says what to type instead.
    """
    check_shard(shard, mesh)
    data = mesh.shape["data"]
    if microbatch % data:
        raise ValueError(
            f"A microbatch of {microbatch} sequences does not divide over {data} data-parallel copies. "
            f"Type batch={math.ceil(microbatch / data) * data} (times accumulate=)."
        )
    planner = _Planner(parallel, model, mesh, microbatch // data, seq, chip, constants, shard)
    algorithms = layer_algorithms(parallel, model.layers)
    check_effect(parallel, set(itertools.chain(*algorithms)))
    blocks = [planner.block(*names) for names in algorithms]
    groups = tuple((plan, len(list(equal))) for plan, equal in itertools.groupby(blocks))
    return ModelPlan(groups, planner.head(parallel.algorithm), shard=shard)


def describe_plan(plan: ModelPlan) -> str:
    """One line with the algorithm, dataflows and slice counts of every group of layers."""
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
    """The lowering options of a chip; the defaults for an unknown chip."""
    return LoweringOptions(**chip.lowering) if chip else LoweringOptions()


@functools.cache
def canonical_plan(model: ModelConfig) -> ModelPlan:
    """The plan whose stored parameters are canonical: no reordering, no padding, all layers in one group.

    Its mesh has one device of this process.
    """
    import jax

    mesh = Mesh(np.array(jax.devices()[:1]).reshape((1,) * len(AXES)), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    return dataclasses.replace(make_plan(ParallelConfig("gspmd"), model, mesh, 1, 1), padded=False)


@dataclasses.dataclass(frozen=True)
class _Planner:
    parallel: ParallelConfig
    model: ModelConfig
    mesh: Mesh | AbstractMesh
    sequences: int  # of one data-parallel copy
    seq: int
    chip: Chip | None
    constants: Constants | None = None
    shard: str = "none"

    @functools.cached_property
    def tuned(self):
        """The tuner's choices for MeshSlice by product; empty without a known chip."""
        shape = (self.mesh.shape["row"], self.mesh.shape["col"])
        return tune_products(self.model, self.parallel, shape, self.sequences * self.seq, self.chip, self.constants)

    def block(self, attention: str, mlp: str) -> BlockPlan:
        plan = BlockPlan(self._pair(attention, ATTENTION), self._pair(mlp, MLP))
        self._check_heads(plan.attention)
        return plan

    def head(self, algorithm: str) -> Plan:
        """The plan of the output projection. The logits, its largest matrix, stay in place; tokens keep their order."""
        grid = self._grid(algorithm)
        swap = self._flow(algorithm, 1, 1, "attention in") == "rs"
        plan = Plan(algorithm, "rs" if swap else "os", grid)
        vocab_size = self.model.vocab_size or 1
        padded = vocab_size + ModelPlan((), plan).vocab_padding(vocab_size)
        plan.check(self.model.width, padded, self.sequences, "the output projection")
        if self.model.tied or swap:  # the tied table has one storage order, and slices of rs reorder tokens
            return plan
        return self._sliced(plan, self.model.width, padded, "the output projection")

    def _grid(self, algorithm: str) -> Grid:
        return dataclasses.replace(grid_of(algorithm, self.mesh), scatter=self.shard in ("gradients", "parameters"))

    def _pair(self, algorithm: str, half: str) -> PlanPair:
        grid, lowering = self._grid(algorithm), chip_lowering(self.chip)
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
        if into == out == "rs":  # both must use the same order of sequences
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
        """The tuner's slice count, or the largest smaller one whose slices are multiples of `LANES`."""
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
