"""tune=compile: the cost model's best candidates, each compiled as the whole training step; the fastest wins.

The step and not its layers, because forward and backward, norms, loss and update share links and memory, and
a layer that is fast alone may expose more in the step. First the best meshes at the cost model's own slice
counts, then one slice count for all products on the fastest of them.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from mstrain.compiler.compile import DoesNotFit, compile_step
from mstrain.compiler.schedule import Schedule, predict
from mstrain.compiler.topology import Target, make_target
from mstrain.hardware import TpuSlice
from mstrain.hardware.constants import constants_for
from mstrain.mesh import MeshShape, make_mesh, parse_mesh
from mstrain.models.auto import projections
from mstrain.models.config import ModelConfig
from mstrain.models.parallel import ParallelConfig, layer_algorithms
from mstrain.models.plan import ModelPlan, make_plan
from mstrain.models.transformer import Transformer
from mstrain.parallel.dataflow import orientations
from mstrain.parallel.product_cost import Layout, layout_cost
from mstrain.planner.meshes import best_meshes, plan_on
from mstrain.program.optimizer import OptimizerConfig, make_optimizer

MESHES = 3  # of the cost model's ranking that are compiled
COUNTS = (1, 2, 4, 8)  # slice counts for all products that are compiled beside the cost model's
STEPS = 1000  # of the learning rate's schedule, which no time depends on


@dataclasses.dataclass(frozen=True)
class Question:
    """What is to be made fast: a training step on a slice. `meshes` restricts the search, empty does not;
    `parallel.slices` fixes the slice count where it is not `auto`.
    """

    model: ModelConfig
    parallel: ParallelConfig
    tpu_slice: TpuSlice
    batch: int
    seq: int
    accumulate: int = 1
    dtype: str = "bfloat16"
    remat: str = "none"
    meshes: tuple[str, ...] = ()

    @property
    def microbatch(self) -> int:
        return self.batch // self.accumulate


@dataclasses.dataclass(frozen=True)
class Trial:
    """One candidate as compiled, on one device and for one step.

    `seconds` are `exposed` communication and the compute of products (`gemm`), kernels, copies and layout
    changes (`move`) and the `rest`. `model_seconds` is what the cost model says of the products alone;
    `memory` is in bytes. None without a result, and `problem` says why.
    """

    mesh: str
    slices: str
    plan: str
    model_seconds: float | None
    seconds: float | None = None
    exposed: float | None = None
    gemm: float | None = None
    kernel: float | None = None
    move: float | None = None
    rest: float | None = None
    memory: float | None = None
    problem: str = ""


@dataclasses.dataclass(frozen=True)
class Answer:
    """The trials, the fastest that fits first and those without a result last."""

    trials: tuple[Trial, ...]

    @property
    def best(self) -> Trial | None:
        """The fastest that fits; None when nothing does."""
        return next((t for t in self.trials if t.seconds and not t.problem), None)

    def chosen(self) -> Trial:
        """The fastest that fits; raises ValueError, with what was missing, when nothing does."""
        if self.best is None:
            raise ValueError(
                f"tune=compile: nothing fits. mesh={self.trials[0].mesh}: {self.trials[0].problem} "
                "Type remat=full or more accumulate=, or take a larger slice."
            )
        return self.best


Place = Callable[[TpuSlice, MeshShape], Target]


def on_present(tpu_slice: TpuSlice, shape: MeshShape) -> Target:
    """A target over the devices that are here."""
    return Target(tpu_slice, make_mesh(shape))


def refine(question: Question, attempt: Callable[[MeshShape, str], Trial]) -> Answer:
    """Tries the candidates with `attempt(mesh, slices)`; raises ValueError when no mesh is legal."""
    trials = [attempt(shape, question.parallel.slices) for shape in meshes_to_try(question)]
    best = ranked(trials).best
    if best and question.parallel.slices == "auto":
        shape = parse_mesh(best.mesh)
        trials += [attempt(shape, slices) for slices in counts_to_try(question, shape)]
    return ranked(trials)


def ranked(trials: Sequence[Trial]) -> Answer:
    """Fastest first; those that do not fit behind, then those without a result."""
    return Answer(tuple(sorted(trials, key=lambda t: (bool(t.problem), t.seconds is None, t.seconds or 0.0))))


def meshes_to_try(question: Question) -> list[MeshShape]:
    """The meshes asked for, or the cost model's best ones on which the plan is legal."""
    if question.meshes:
        return [parse_mesh(mesh) for mesh in question.meshes]
    q = question
    found = best_meshes(q.parallel, q.model, q.microbatch, q.seq, q.tpu_slice.devices, q.tpu_slice)
    roomy = [c for c in found if c.roomy] or found
    return [candidate.shape for candidate in roomy[:MESHES]]


def counts_to_try(question: Question, shape: MeshShape) -> list[str]:
    """Slice counts for all products with a legal plan other than the automatic; none without MeshSlice."""
    used = {name for pair in layer_algorithms(question.parallel, question.model.layers) for name in pair}
    if "meshslice" not in used:
        return []
    seen, found = [_abstract_plan(question, shape, "auto").groups], []
    for slices in map(str, COUNTS):
        try:
            groups = _abstract_plan(question, shape, slices).groups
        except ValueError:
            continue
        if groups not in seen:
            seen.append(groups)
            found.append(slices)
    return found


def _abstract_plan(q: Question, shape: MeshShape, slices: str) -> ModelPlan:
    parallel = dataclasses.replace(q.parallel, slices=slices)
    return plan_on(shape, parallel, q.model, q.microbatch, q.seq, q.tpu_slice.chip)


def compile_candidate(question: Question, shape: MeshShape, slices: str, place: Place = make_target) -> Trial:
    """Compiles the training step on one mesh with one choice of slices, and reads its schedule."""
    q = question
    target = place(q.tpu_slice, shape)
    parallel = dataclasses.replace(q.parallel, slices=slices)
    plan = make_plan(parallel, q.model, target.mesh, q.microbatch, q.seq, q.tpu_slice.chip)
    trial = Trial(str(shape), slices, describe_slices(plan), model_seconds(q, plan))
    module = Transformer(q.model, plan, q.seq, jnp.dtype(q.dtype), q.remat)
    optimizer = make_optimizer(OptimizerConfig().for_width(q.model.width), STEPS)
    try:
        program = compile_step(module, optimizer, target, q.microbatch, q.accumulate)
    except DoesNotFit as error:
        return dataclasses.replace(trial, problem=str(error).partition(". ")[0] + ".", memory=error.needed)
    except jax.errors.JaxRuntimeError as error:  # this compiler cannot compile it: another candidate may do
        return dataclasses.replace(trial, problem=str(error).splitlines()[0])
    problem = "" if program.memory.fits else "does not fit"
    return dataclasses.replace(trial, problem=problem, memory=program.memory.peak, **parts(predict(program)))


def parts(schedule: Schedule) -> dict[str, float]:
    """Seconds of a schedule and of what it consists of, as a `Trial` has them."""
    clock = schedule.machine.clock
    compute = {kind: cycles / clock for kind, cycles in schedule.cycles.items()}
    exposed = schedule.seconds - sum(compute.values())
    rest = compute.pop("other")
    return {"seconds": schedule.seconds, "exposed": exposed, "rest": rest, **compute}


def why_slower(trial: Trial, best: Trial) -> str:
    """What made a candidate lose: why it cannot run, or the part of its time that grew most."""
    if trial.problem or trial == best:
        return trial.problem
    names = {
        "exposed": "exposed communication", "gemm": "products", "kernel": "kernels", "move": "copies",
        "rest": "norms, sums, updates",
    }  # fmt: skip
    growth = {name: getattr(trial, name) - getattr(best, name) for name in names}
    part = max(growth, key=growth.get)
    return f"{names[part]} +{1e3 * growth[part]:,.1f} ms"


def describe_slices(plan: ModelPlan) -> str:
    """Dataflows and slice counts of the four products of each group of layers: `os/4 ls/4 os/8 ls/8`."""
    return ", ".join(
        " ".join(f"{p.dataflow}/{p.slices}" for p in block.products) for block, _ in plan.groups
    )


def model_seconds(question: Question, plan: ModelPlan) -> float | None:
    """The cost model's seconds for the products of one step; None with an algorithm that it does not know."""
    constants, mesh = constants_for(question.tpu_slice), plan.mesh.shape
    tokens = question.microbatch * question.seq // mesh["data"]
    total = 0.0
    for block, count in plan.groups:
        if any(p.algorithm not in ("meshslice", "collective") for p in block.products):
            return None
        own = projections(question.model)
        turned = orientations(own, [p.dataflow for p in block.products])
        for projection, p, transposed in zip(own, block.products, turned, strict=False):
            layout = Layout(projection, tokens, mesh["row"], mesh["col"], p.dataflow, transposed)
            total += count * layout_cost(layout, p.slices, constants).seconds
    return question.accumulate * total
