"""From what a person asked of the parallelism to a plan for every product of a model.

`ParallelConfig` is what the person wrote, `ModelPlan` what the model obeys. `make_plan` checks everything that needs no
device time: spelling, divisibility, legal slice counts, options without effect.
"""

import dataclasses
import functools
import itertools
import math
import re

import numpy as np
from jax.sharding import AxisType, Mesh

from mstrain.gemm import DATAFLOWS, Grid, Plan, PlanPair, check_algorithm, grid_of, legal_slices
from mstrain.gemm.plan import CHOOSES_DATAFLOW, ONE_DIMENSIONAL
from mstrain.mesh import AXES
from mstrain.models.config import ModelConfig

HALVES = ("attention", "mlp")
SLICES_WITHOUT_TUNING = (4, 3, 2, 1)  # auto takes the first legal one when no chip is known to tune for


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    """Which algorithm computes which products.

    Attributes:
      algorithm: of every layer.
      attention, mlp: of that half of every block, instead.
      layers: exceptions, separated by spaces, each `LAYERS:ALGO` or `LAYERS:attention:ALGO` or `LAYERS:mlp:ALGO` where
        LAYERS is a layer (`3`) or an inclusive range (`0-5`, `6-`); later ones win.
      slices: MeshSlice's slice count, or `auto`.
      dataflow: `os`, `ls`, `rs` for every product, or `auto`: the largest of input, weight and output stays.
    """

    algorithm: str = "meshslice"
    attention: str | None = None
    mlp: str | None = None
    layers: str | None = None
    slices: str = "auto"
    dataflow: str = "auto"


@dataclasses.dataclass(frozen=True)
class BlockPlan:
    attention: PlanPair
    mlp: PlanPair

    @property
    def mesh(self) -> Mesh:
        return self.attention.grid.mesh


@dataclasses.dataclass(frozen=True)
class ModelPlan:
    """Plans of consecutive groups of equal layers, with their lengths, and of the output projection.

    `padded`: the vocabulary may grow by symbols that are never used; not so for canonical parameters.
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

    def vocabulary_padding(self, vocabulary: int) -> int:
        """Symbols to add so that vocabulary shards are equal, and whole 128-wide lanes for large vocabularies."""
        if not self.padded:
            return 0
        unit = math.lcm(self.head.grid.num_rows, self.head.grid.num_cols)
        unit *= 128 if vocabulary >= 8192 else 1
        return -vocabulary % unit


def make_plan(parallel: ParallelConfig, model: ModelConfig, mesh: Mesh, microbatch: int, seq: int) -> ModelPlan:
    """Plans every product of `model` on `mesh`.

    Args:
      microbatch: sequences that go through the model at once, whole job.
      seq: tokens per sequence.

    Raises:
      ValueError: what is wrong and what to type instead.
    """
    data = mesh.shape["data"]
    if microbatch % data:
        raise ValueError(
            f"A microbatch of {microbatch} sequences does not divide over {data} data-parallel copies. "
            f"Type batch={math.ceil(microbatch / data) * data} (times accumulate=)."
        )
    planner = _Planner(parallel, model, mesh, microbatch // data, seq)
    algorithms = layer_algorithms(parallel, model.layers)
    _check_effect(parallel, set(itertools.chain(*algorithms)))
    blocks = [planner.block(*names) for names in algorithms]
    groups = tuple((plan, len(list(equal))) for plan, equal in itertools.groupby(blocks))
    return ModelPlan(groups, planner.head(parallel.algorithm))


@functools.cache
def canonical_plan(model: ModelConfig) -> ModelPlan:
    """Every parameter whole, in canonical order, all layers in one group: the form that checkpoints carry.

    Needs no device: the mesh is of this process's CPU, or absent when shapes alone are asked for.
    """
    import jax

    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), AXES, axis_types=(AxisType.Auto,) * 3)
    return dataclasses.replace(make_plan(ParallelConfig("gspmd"), model, mesh, 1, 1), padded=False)


def layer_algorithms(parallel: ParallelConfig, layers: int) -> list[tuple[str, str]]:
    """(attention, mlp) algorithm of every layer; raises ValueError on a spelling it cannot read."""
    everywhere = [check_algorithm(half or parallel.algorithm) for half in (parallel.attention, parallel.mlp)]
    names = [list(everywhere) for _ in range(layers)]
    for rule in (parallel.layers or "").split():
        match = re.fullmatch(r"(\d{1,6})(?:(-)(\d{1,6})?)?:(?:(attention|mlp):)?([A-Za-z_]\w*)", rule)
        if not match:
            raise ValueError(
                f"parallel.layers: cannot read {rule!r}. Write LAYERS:ALGO or LAYERS:mlp:ALGO separated by "
                'spaces, such as parallel.layers="0-3:megatron 4-:mlp:fsdp".'
            )
        first, dash, last, half, algorithm = match.groups()
        first = int(first)
        last = int(last) if last else (layers - 1 if dash else first)
        if not first <= last < layers:
            raise ValueError(f"parallel.layers: {rule!r} names layers outside 0-{layers - 1} of this model.")
        for layer in range(first, last + 1):
            for i, name in enumerate(HALVES):
                if half in (None, name):
                    names[layer][i] = check_algorithm(algorithm)
    return [tuple(pair) for pair in names]


def _check_effect(parallel: ParallelConfig, used: set[str]) -> None:
    """An option that would change nothing is an error."""
    if parallel.slices != "auto" and "meshslice" not in used:
        raise ValueError(
            f"parallel.slices={parallel.slices} has no effect: no layer uses meshslice. Drop it, or type parallel=meshslice."
        )
    if parallel.dataflow not in ("auto", *DATAFLOWS):
        raise ValueError(f"parallel.dataflow={parallel.dataflow!r} is unknown. Choose auto, os, ls or rs.")
    if parallel.dataflow != "auto" and not used & CHOOSES_DATAFLOW:
        raise ValueError(
            f"parallel.dataflow={parallel.dataflow} has no effect on {', '.join(sorted(used))}. Drop it, or choose one of "
            f"{', '.join(sorted(CHOOSES_DATAFLOW))}."
        )


@dataclasses.dataclass(frozen=True)
class _Planner:
    parallel: ParallelConfig
    model: ModelConfig
    mesh: Mesh
    sequences: int  # of one data-parallel copy
    seq: int

    def block(self, attention: str, mlp: str) -> BlockPlan:
        m = self.model
        heads, kv = m.heads * m.head_width, m.num_kv_heads * m.head_width
        qkv, up = (heads, kv, kv), (m.hidden,) * (2 if m.gated else 1)
        plan = BlockPlan(
            self._pair(attention, "attention", qkv, heads), self._pair(mlp, "mlp", up, m.hidden)
        )
        self._check_heads(plan.attention)
        return plan

    def head(self, algorithm: str) -> Plan:
        """The output projection: largest of its three matrices is the logits, which stay; tokens keep their order."""
        grid = grid_of(algorithm, self.mesh)
        swap = ONE_DIMENSIONAL.get(algorithm) == "rs" or self._flow(algorithm, 1, 1) == "rs"
        plan = Plan(algorithm, "rs" if swap else "os", grid)
        vocabulary = self.model.vocabulary or 1
        padded = vocabulary + ModelPlan((), plan).vocabulary_padding(vocabulary)
        plan.check(self.model.width, padded, self.sequences, "the output projection")
        if self.model.tied or swap:  # a shared table has one order, and loss and targets need tokens in theirs
            return plan
        return self._sliced(plan, self.model.width, padded, "the output projection")

    def _pair(self, algorithm: str, half: str, segments: tuple[int, ...], inside: int) -> PlanPair:
        grid, width, total = grid_of(algorithm, self.mesh), self.model.width, sum(segments)
        into, out = self._flow(algorithm, width, total), self._flow(algorithm, inside, width)
        into_plan = Plan(algorithm, into, grid)
        out_plan = Plan(algorithm, out, grid.swapped if out == "rs" else grid)
        for segment in segments:
            if segment % grid.num_cols:
                raise ValueError(
                    f"{half}: {segment} features do not divide over the {grid.num_cols} columns of {algorithm} on "
                    f"mesh {grid.num_rows}x{grid.num_cols}. Choose another mesh= or other model sizes."
                )
        pair = PlanPair(
            self._sliced(into_plan, width, total, f"{half} in"),
            self._sliced(out_plan, inside, width, f"{half} out"),
        )
        self._check_sequences(pair, half)
        return pair

    def _flow(self, algorithm: str, in_dim: int, out_dim: int) -> str:
        if algorithm in ONE_DIMENSIONAL:
            return ONE_DIMENSIONAL[algorithm]
        if algorithm == "gspmd":
            return "os"
        if self.parallel.dataflow != "auto":
            return self.parallel.dataflow
        return "os" if out_dim > in_dim else "ls"

    def _sliced(self, plan: Plan, in_dim: int, out_dim: int, what: str) -> Plan:
        if plan.algorithm == "meshslice":
            if self.parallel.slices == "auto":
                legal = legal_slices(
                    plan.dataflow, in_dim, out_dim, self.sequences, plan.grid.num_rows, plan.grid.num_cols
                )
                slices = next(s for s in SLICES_WITHOUT_TUNING if s in legal)
            else:
                slices = parse_slices(self.parallel.slices)
            plan = dataclasses.replace(plan, slices=slices)
        plan.check(in_dim, out_dim, self.sequences, what)
        return plan

    def _check_heads(self, pair: PlanPair) -> None:
        columns = pair.grid.num_cols
        for name, heads in (("heads", self.model.heads), ("kv_heads", self.model.num_kv_heads)):
            if heads % columns:
                fits = [c for c in range(1, heads + 1) if heads % c == 0]
                raise ValueError(
                    f"model.{name}={heads} does not divide over {columns} columns of {pair.into.algorithm}: attention "
                    f"works on whole heads. Choose a mesh= with a column count out of {fits}."
                )

    def _check_sequences(self, pair: PlanPair, half: str) -> None:
        inside, residual = (pair.grid.size(x.tokens[1:]) for x in (pair.inside, pair.residual))
        if half == "attention" and self.sequences % inside:
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


def parse_slices(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,5}", str(text)):
        raise ValueError(f"parallel.slices={text!r} is no slice count. Type a whole number such as 4, or auto.")
    return int(text)
