"""Makes the plan of every product of a model (`ModelPlan`) from the user's `ParallelConfig`.

`make_plan` runs all checks that need no device: names, divisibility, legal slice counts, options without effect.
"""

import dataclasses
import functools
import itertools
import math

import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from mstrain.gemm import (
    Grid,
    Heads,
    LoweringOptions,
    Plan,
    PlanPair,
    Span,
    find_algorithm,
    grid_of,
    legal_slices,
)
from mstrain.gemm.copies import COPIES
from mstrain.gemm.padding import MOST_WASTE, waste
from mstrain.hardware import Chip
from mstrain.hardware.constants import Constants
from mstrain.layers.latent_attention import LatentPlans
from mstrain.layers.sequence_split import SequenceSplit
from mstrain.mesh import AXES, platform_of, shape_of
from mstrain.models.auto import tune_products
from mstrain.models.config import ModelConfig
from mstrain.models.context import CONTEXT, check_one_order, choose_exchange, sequence_split, split_axes
from mstrain.models.expert_axis import check_experts, expert_slices
from mstrain.models.model_plan import BlockPlan, ModelPlan
from mstrain.models.parallel import ParallelConfig, check_effect, layer_algorithms, parse_slices
from mstrain.models.products import (
    ATTENTION,
    DENSE,
    HALVES,
    MLP,
    MTP,
    Sizes,
    block_products,
    dense_products,
    latent_sizes,
)
from mstrain.models.scheduling import with_scheduling_groups
from mstrain.models.sharding import check_shard
from mstrain.models.stages import AXIS, PipelineConfig, check_division, make_stages
from mstrain.parallel.tune import fewest_slices

SLICES_WITHOUT_TUNING = 4  # on unknown accelerators, auto takes the largest legal slice count up to this


def _or(values) -> str:
    return " or ".join(values)


def make_plan(
    parallel: ParallelConfig, model: ModelConfig, mesh: Mesh | AbstractMesh, microbatch: int, seq: int,
    chip: Chip | None = None, constants: Constants | None = None, shard: str = "none",
    pipeline: PipelineConfig = PipelineConfig(),
) -> ModelPlan:  # fmt: skip
    """Plans every product of `model` on `mesh`.

    Args:
      microbatch: sequences per microbatch of the whole job.
      seq: tokens per sequence.
      chip: the chip for which MeshSlice's automatic dataflows and slice counts are tuned; None takes the paper's rule,
        and one slice on CPUs, few on other devices.
      constants: measured constants that replace those derived from the chip.
      shard: what is sharded over data-parallel replicas, one of `mstrain.models.sharding.SHARD`.
      pipeline: schedule and division of the layers where `mesh` has several stages.

    Raises:
      ValueError: the plan is illegal; the message says what to type instead.
    """
    check_shard(shard, mesh)
    check_experts(model, parallel, shape_of(mesh))
    algorithms = layer_algorithms(parallel, model.layers)
    check_effect(parallel, set(itertools.chain(*algorithms)))
    stages = make_stages(pipeline, mesh.shape[AXIS], model.layer_groups[-1][1])
    if stages:
        check_division(stages, algorithms, model)
    plan = _Planner(parallel, model, mesh, microbatch, seq, chip, constants, shard).plan(algorithms)
    return with_scheduling_groups(dataclasses.replace(plan, stages=stages), model)


def _overlaps_nothing(mesh: Mesh | AbstractMesh) -> bool:
    """Whether the devices are CPUs, whose collectives never run beside a product."""
    return isinstance(mesh, Mesh) and platform_of(mesh) == "cpu"


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
    microbatch: int  # sequences of the whole job
    seq: int
    chip: Chip | None
    constants: Constants | None = None
    shard: str = "none"

    def plan(self, algorithms: list[tuple[str, str]]) -> ModelPlan:
        """The plan of a model whose layers have these (attention, mlp) algorithms."""
        head = self._head(self.parallel.algorithm)
        dense, algorithms = algorithms[: self.model.dense_layers], algorithms[self.model.dense_layers :]
        if len(set(dense)) > 1:
            raise ValueError("parallel.layers: the first, dense layers need the same algorithms. Give them one rule.")
        chosen = {(a, half) for names in algorithms for a, half in zip(names, HALVES, strict=True)}
        chosen |= {(a, half) for names in dense for a, half in zip(names, (ATTENTION, DENSE), strict=True)}
        pairs = {key: self._pair(*key) for key in sorted(chosen)}
        unit = self._sequence_unit(pairs, head) * shape_of(self.mesh).copies
        self._check_sequences(unit)
        sequences = -(-self.microbatch // unit) * unit // shape_of(self.mesh).copies
        if self._rows_split:  # every slice of tokens has parts of whole sequences
            sequences *= math.lcm(self.mesh.shape["row"], self.mesh.shape["col"])
        units = [n for pair in pairs.values() for n in (pair.into.units[0], pair.out.units[1])]
        mtp = self._mtp(head) if self.model.mtp_layers else None
        width = Span(self.model.width).to_multiple(math.lcm(head.units[0], *units, *(mtp.units if mtp else ())))
        blocks = {names: self._block(pairs, names, width, sequences) for names in sorted(set(algorithms))}
        first = tuple((self._block(pairs, names, width, sequences, DENSE), len(dense)) for names in dense[:1])
        groups = tuple((blocks[names], len(list(equal))) for names, equal in itertools.groupby(algorithms))
        if self._rows_split:
            check_one_order([block.attention for block in (*blocks.values(), *(block for block, _ in first))])
        head = self._sliced_head(head, width, sequences)
        mtp = mtp and self._sliced(mtp, 2 * width.stored, width.stored, sequences, MTP)
        return ModelPlan(groups, head, first, shard=self.shard, sequence_unit=unit, mtp=mtp)

    @functools.cached_property
    def _split(self) -> tuple[str, ...]:
        """Mesh axes that split every sequence."""
        algorithms = {attention for attention, _ in layer_algorithms(self.parallel, self.model.layers)}
        rows = {grid_of(algorithm, self.mesh).rows for algorithm in algorithms}
        return split_axes(self.parallel, self.mesh, rows, self.microbatch, self.seq)

    @property
    def _rows_split(self) -> bool:
        return bool(set(self._split) - {CONTEXT})

    @functools.cached_property
    def tuned(self):
        """The tuner's choices for MeshSlice by product; empty without a known chip."""
        shape = (self.mesh.shape["row"], self.mesh.shape["col"])
        whole = 1 if self._rows_split else shape[0]  # sequences are padded to a multiple of it
        sequences = -(-self.microbatch // (shape_of(self.mesh).copies * whole)) * whole
        tokens = sequences * self.seq // self.mesh.shape[CONTEXT]
        return tune_products(self.model, self.parallel, shape, tokens, self.chip, self.constants)

    def _head(self, algorithm: str) -> Plan:
        """The plan of the output projection. The logits, its largest matrix, stay in place; tokens keep their order."""
        swap = self._flow(algorithm, 1, 1, "attention in") == "rs"
        return Plan(algorithm, "rs" if swap else "os", self._grid(algorithm), lowering=chip_lowering(self.chip))

    def _sliced_head(self, plan: Plan, width: Span, sequences: int) -> Plan:
        vocab_size = self.model.vocab_size or 1
        sizes = width.stored, vocab_size + ModelPlan((), plan).vocab_padding(vocab_size)
        plan.check(*sizes, sequences, "the output projection")
        return plan

    def _mtp(self, head: Plan) -> Plan:
        """The plan, in one slice, of the product that makes one vector of two; its inputs have the layout of `head`."""
        width = self.model.width
        flow = head.dataflow if head.dataflow == "rs" else self._flow(head.algorithm, 2 * width, width, MTP)
        return dataclasses.replace(head, dataflow=flow)

    def _grid(self, algorithm: str) -> Grid:
        return dataclasses.replace(grid_of(algorithm, self.mesh), scatter=self.shard in ("gradients", "parameters"))

    def _pair(self, algorithm: str, half: str) -> PlanPair:
        """The plans of one half of a block in one slice."""
        grid, lowering = self._grid(algorithm), chip_lowering(self.chip)
        products = (p for p in (*block_products(self.model), *dense_products(self.model)) if p.half == half)
        into, out = (self._flow(algorithm, p.in_dim, p.out_dim, p.name) for p in products)
        out_grid = grid.swapped if out == "rs" else grid
        plans = Plan(algorithm, into, grid, lowering=lowering), Plan(algorithm, out, out_grid, lowering=lowering)
        if half != ATTENTION or not self.model.latent.key_rank:
            return PlanPair(*plans)
        name = algorithm if "os" in find_algorithm(algorithm).dataflows else "collective"
        return LatentPlans(*plans, Plan(name, "os", grid, lowering=lowering))

    def _block(self, pairs: dict, names: tuple[str, str], width: Span, sequences: int, last: str = MLP) -> BlockPlan:
        """`last` is the second half: MLP or DENSE."""
        attention, mlp = pairs[names[0], ATTENTION], pairs[names[1], last]
        m, key_unit = self.model, attention.into.units[1]
        latent_unit = math.lcm(attention.grid.num_rows, attention.grid.num_cols) if m.latent.key_rank else 1
        unit = math.lcm(key_unit, attention.out.units[0], latent_unit)
        heads = Heads(m.heads, m.num_kv_heads, m.head_dim, attention.grid.num_cols, unit, key_unit)
        unit = math.lcm(mlp.into.units[1], mlp.out.units[0], mlp.grid.num_cols)
        hidden = m.mlp_dim if last == MLP else m.first_layers.mlp_dim
        sizes = Sizes(width, Span(hidden).to_multiple(unit), heads, latent_sizes(m, heads))
        self._check_waste(sizes, names)
        products = (*block_products(m, sizes), *dense_products(m, sizes))
        first, second = (self._sliced_pair(pair, products, half, sequences)
                         for pair, half in ((attention, ATTENTION), (mlp, last)))  # fmt: skip
        tokens, overlaps = sequences * self.seq // self.mesh.shape[CONTEXT], not _overlaps_nothing(self.mesh)
        slices = expert_slices(self.parallel, m, second.into, tokens, self.chip, self.constants, overlaps)
        return BlockPlan(first, second, sizes, self._sequence_split(heads, attention), slices)

    def _sliced_pair(self, pair: PlanPair, products, half: str, sequences: int) -> PlanPair:
        first, last = (product for product in products if product.half == half)
        into = self._sliced(pair.into, first.in_dim, first.out_dim, sequences, first.name)
        out = self._sliced(pair.out, last.in_dim, last.out_dim, sequences, last.name)
        if into.dataflow == out.dataflow == "rs":  # both must use the same order of sequences
            slices = min(into.slices, out.slices)
            into, out = (dataclasses.replace(plan, slices=slices) for plan in (into, out))
        return dataclasses.replace(pair, into=into, out=out)

    def _flow(self, algorithm: str, in_dim: int, out_dim: int, what: str) -> str:
        kind, grouped = find_algorithm(algorithm), self._is_grouped(what)
        if kind.only_dataflow:
            return kind.only_dataflow
        if self.parallel.dataflow != "auto":
            if grouped and self.parallel.dataflow not in kind.grouped:
                raise ValueError(
                    f"parallel.dataflow={self.parallel.dataflow}: {algorithm} does not support it for experts. Type "
                    f"parallel.dataflow={_or(kind.grouped)}, or parallel.mlp=collective."
                )
            return self.parallel.dataflow
        if kind.sliced and what in self.tuned and not (grouped and self.tuned[what].dataflow == "rs"):
            return self.tuned[what].dataflow
        if grouped:  # the hidden side has a row for every choice
            chosen = self.model.experts_per_token
            in_dim, out_dim = (in_dim, chosen * out_dim) if what == "mlp in" else (chosen * in_dim, out_dim)
        return "os" if out_dim > in_dim else "ls"

    def _is_grouped(self, what: str) -> bool:
        """Whether a product is one of experts."""
        return self.model.experts is not None and what.startswith(MLP)

    def _sliced(self, plan: Plan, in_dim: int, out_dim: int, sequences: int, what: str) -> Plan:
        if plan.kind.sliced and not (plan.dataflow == "rs" and (what == MTP or self._is_grouped(what))):
            if self.parallel.slices == "auto":
                legal = legal_slices(plan.dataflow, in_dim, out_dim, sequences, plan.grid.num_rows, plan.grid.num_cols)
                slices = self._automatic_slices(legal, what)
            else:
                slices = parse_slices(self.parallel.slices)
            plan = dataclasses.replace(plan, slices=slices)
        plan.check(in_dim, out_dim, sequences, what)
        return plan

    def _automatic_slices(self, legal: list[int], what: str) -> int:
        """The fewest slices that are as fast as the tuner's fastest count, of those that are legal here."""
        if what not in self.tuned:
            untuned = 1 if _overlaps_nothing(self.mesh) else SLICES_WITHOUT_TUNING
            most = min([untuned, *(choice.slices for choice in self.tuned.values())])
            return max(s for s in legal if s <= most)
        seconds = {slices: time for slices, time in self.tuned[what].trials if slices in legal}
        return fewest_slices(seconds) if seconds else 1

    def _sequence_split(self, heads: Heads, attention: PlanPair) -> SequenceSplit:
        split = sequence_split(self._split, self.mesh)
        if split.parts == 1:
            return split
        devices = attention.grid.size(attention.inside.tokens)
        tokens = -(-self.microbatch * self.seq // devices)
        exchange = choose_exchange(self.parallel, heads, split, tokens, self.seq, self.chip, self.constants)
        return dataclasses.replace(split, exchange=exchange)

    def _check_waste(self, sizes: Sizes, names: tuple[str, str]) -> None:
        for name, share in sizes.waste.items():
            if share <= MOST_WASTE:
                continue
            algorithm, m = names[HALVES.index(MLP if name == "mlp_dim" else ATTENTION)], self.model
            where = f"mesh {shape_of(self.mesh)} with {algorithm}"
            advice = "Choose another mesh= or other model sizes."
            if name == "heads":
                where, tensor = (
                    f"{sizes.heads.columns} columns of {algorithm}",
                    self.mesh.shape["row"] * self.mesh.shape["col"],
                )
                fits = [c for c in range(1, tensor + 1) if tensor % c == 0]
                fits = [c for c in fits if Heads(m.heads, m.num_kv_heads, m.head_dim, c).waste <= MOST_WASTE]
                advice = f"Choose a mesh= with a column count out of {fits}."
            raise ValueError(
                f"model.{name}={getattr(m, name)} does not divide over {where}: {share:.0%} would be padding, more "
                f"than {MOST_WASTE:.0%}. {advice}"
            )

    def _sequence_unit(self, pairs: dict, head: Plan) -> int:
        """The multiple to which the sequences of one data-parallel replica are padded, so that devices have whole
        sequences in attention."""
        units = []
        for (_, half), pair in pairs.items():
            inside, residual = (pair.grid.size(x.tokens[len(COPIES) :]) for x in (pair.inside, pair.residual))
            whole = half == ATTENTION and not self._rows_split
            units += [inside if whole else self._per_token(inside), self._per_token(residual)]
        layouts = (head.input_layout, head.output_layout)
        return math.lcm(*units, *(self._per_token(head.grid.size(x.tokens[len(COPIES) :])) for x in layouts))

    def _per_token(self, devices: int) -> int:
        """Number of sequences whose tokens divide over `devices`."""
        return devices // math.gcd(devices, self.seq // self.mesh.shape[CONTEXT])

    def _check_sequences(self, unit: int) -> None:
        share = waste(self.microbatch, -(-self.microbatch // unit) * unit)
        if share and self.model.expert_capacity is not None:
            raise ValueError(
                f"model.expert_capacity={self.model.expert_capacity} would count padding: {self.microbatch} sequences "
                f"per microbatch are computed in multiples of {unit} on mesh {shape_of(self.mesh)}. Type a batch= that "
                f"is a multiple of {unit} (times accumulate=), or model.expert_capacity=null."
            )
        if share > MOST_WASTE:
            raise ValueError(
                f"{self.microbatch} sequences per microbatch do not divide over mesh {shape_of(self.mesh)} with "
                f"{self.parallel.algorithm}, which computes them in multiples of {unit}: {share:.0%} would be padding, "
                f"more than {MOST_WASTE:.0%}. Type a batch= that is a multiple of {unit} (times accumulate=)."
            )
