"""tune=compile: compiles the cost model's best candidates as whole training steps and chooses the fastest.

The step and not its layers, because forward and backward, norms, loss and update share links and memory, and
a layer that is fast alone may expose more in the step. First the best meshes at the cost model's own slice
counts, then one slice count for all products on the fastest of them.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax

from mstrain.compiler.compile import DoesNotFit, OutOfScratch, compile_program
from mstrain.compiler.schedule import Schedule, predict
from mstrain.compiler.topology import Target, make_target
from mstrain.display.tables import most_grown
from mstrain.gemm import any_sliced
from mstrain.hardware import TpuSlice
from mstrain.hardware.pod import pod_of
from mstrain.mesh import MeshShape, abstract_mesh, make_mesh, parse_mesh
from mstrain.models.parallel import layer_algorithms
from mstrain.models.plan import ModelPlan
from mstrain.models.remat import AUTO
from mstrain.models.stages import make_stages
from mstrain.planner.cost import cost_step
from mstrain.planner.plan import PodPlan
from mstrain.planner.request import PlanRequest
from mstrain.planner.search import rank_meshes
from mstrain.program.step_config import StepConfig

MESHES = 3  # of the cost model's ranking that are compiled
COUNTS = (1, 2, 4, 8)  # slice counts for all products that are compiled beside the cost model's


@dataclasses.dataclass(frozen=True)
class TuningTask:
    """What is to be made fast: a training step on a TPU slice. `meshes` restricts the search, empty does not;
    `parallel.slices` of the step fixes the slice count where it is not `auto`.
    """

    step: StepConfig
    tpu_slice: TpuSlice
    meshes: tuple[str, ...] = ()

    @property
    def request(self) -> PlanRequest:
        """The same of the cost model."""
        return PlanRequest.of(self.step, pod_of(self.tpu_slice, self.tpu_slice.devices))

    def candidate(self, slices: str) -> StepConfig:
        """The step with a choice of slices, and with `remat=auto` the remat that fits wherever one does."""
        parallel = dataclasses.replace(self.step.parallel, slices=slices)
        remat = "full" if self.step.remat == AUTO else self.step.remat
        return dataclasses.replace(self.step, parallel=parallel, remat=remat)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One candidate as compiled, on one device and for one step.

    `seconds` are `exposed` communication and the compute of products (`gemm`), kernels, copies and layout
    changes (`move`) and the `rest`, which includes waiting for the HBM. `model_seconds` is the cost model's
    prediction of the products alone; `memory` is in bytes. Without a result they are None, and `problem` is the reason.
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
class TuningResult:
    """The candidates, the fastest that fits first and those without a result last."""

    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate | None:
        """The fastest that fits; None when nothing does."""
        return next((t for t in self.candidates if t.seconds and not t.problem), None)

    def chosen(self) -> Candidate:
        """The fastest that fits; raises ValueError, with what was missing, when nothing does."""
        if self.best is None:
            raise ValueError(
                f"tune=compile: nothing fits. mesh={self.candidates[0].mesh}: {self.candidates[0].problem} "
                "Type remat=full or more accumulate=, or take a larger TPU slice."
            )
        return self.best


Place = Callable[[TpuSlice, MeshShape], Target]


def on_present(tpu_slice: TpuSlice, shape: MeshShape) -> Target:
    return Target(tpu_slice, make_mesh(shape))


def refine(task: TuningTask, attempt: Callable[[MeshShape, str], Candidate]) -> TuningResult:
    """Tries the candidates with `attempt(mesh, slices)`; raises ValueError when no mesh is legal."""
    candidates = [attempt(shape, task.step.parallel.slices) for shape in meshes_to_try(task)]
    best = ranked(candidates).best
    if best and task.step.parallel.slices == "auto":
        shape = parse_mesh(best.mesh)
        candidates += [attempt(shape, slices) for slices in counts_to_try(task, shape)]
    return ranked(candidates)


def ranked(candidates: Sequence[Candidate]) -> TuningResult:
    """Fastest first; those that do not fit behind, then those without a result."""
    return TuningResult(tuple(sorted(candidates, key=lambda t: (bool(t.problem), t.seconds is None, t.seconds or 0.0))))


def meshes_to_try(task: TuningTask) -> list[MeshShape]:
    """The meshes of the task, or the cost model's best ones on which the plan is legal."""
    if task.meshes:
        return [parse_mesh(mesh) for mesh in task.meshes]
    found = rank_meshes(task.request)
    fitting = [costed for costed in found if costed.fits] or found
    return [costed.shape for costed in fitting[:MESHES]]


def counts_to_try(task: TuningTask, shape: MeshShape) -> list[str]:
    """Slice counts for all products with a legal plan other than the automatic; none without MeshSlice."""
    used = {name for pair in layer_algorithms(task.step.parallel, task.step.model.layers) for name in pair}
    if not any_sliced(used):
        return []
    seen, found = [_abstract_plan(task, shape, "auto").groups], []
    for slices in map(str, COUNTS):
        try:
            groups = _abstract_plan(task, shape, slices).groups
        except ValueError:
            continue
        if groups not in seen:
            seen.append(groups)
            found.append(slices)
    return found


def _abstract_plan(task: TuningTask, shape: MeshShape, slices: str) -> ModelPlan:
    return task.candidate(slices).plan(abstract_mesh(shape), task.tpu_slice)


def compile_candidate(task: TuningTask, shape: MeshShape, slices: str, place: Place = make_target) -> Candidate:
    """Compiles the training step on one mesh with one choice of slices, and reads its schedule."""
    target, step = place(task.tpu_slice, shape), task.candidate(slices)
    plan = step.plan(target.mesh, task.tpu_slice)
    candidate = Candidate(str(shape), slices, describe_slices(plan), model_seconds(task, shape, slices))
    try:
        program = compile_program(step.program(step.module(plan), step.make_optimizer()), target)
    except DoesNotFit as error:
        return dataclasses.replace(candidate, problem=str(error).partition(". ")[0] + ".", memory=error.needed)
    except (
        OutOfScratch,
        jax.errors.JaxRuntimeError,
    ) as error:  # this compiler cannot compile it: another candidate may do
        return dataclasses.replace(candidate, problem=str(error).splitlines()[0])
    problem = "" if program.memory.fits else "does not fit"
    return dataclasses.replace(candidate, problem=problem, memory=program.memory.peak, **parts(predict(program)))


def parts(schedule: Schedule) -> dict[str, float]:
    """Seconds of a schedule and of what it consists of, as a `Candidate` has them."""
    clock = schedule.machine.clock
    compute = {kind: cycles / clock for kind, cycles in schedule.cycles.items()}
    exposed = schedule.seconds - sum(compute.values())
    rest = compute.pop("other") + compute.pop("memory")
    return {"seconds": schedule.seconds, "exposed": exposed, "rest": rest, **compute}


def why_slower(candidate: Candidate, best: Candidate) -> str:
    """Why a candidate is slower: why it cannot run, or the part of its time that grew most."""
    if candidate.problem or candidate == best:
        return candidate.problem
    names = {
        "exposed": "exposed communication", "gemm": "products", "kernel": "kernels", "move": "copies",
        "rest": "norms, sums, updates",
    }  # fmt: skip
    part, seconds = most_grown(names, candidate, best)
    return f"{names[part]} +{1e3 * seconds:,.1f} ms"


def describe_slices(plan: ModelPlan) -> str:
    """Dataflows and slice counts of the products of each group of layers: `os/4 ls/4 os/8 ls/8`."""
    return ", ".join(" ".join(f"{p.dataflow}/{p.slices}" for p in block.products) for block, _ in plan.groups)


def model_seconds(task: TuningTask, shape: MeshShape, slices: str) -> float | None:
    """The cost model's seconds for the products of one step; None with an algorithm that the cost model does not
    support."""
    step, request = task.candidate(slices), task.request
    stages = make_stages(step.pipeline, shape.stage, step.model.layer_groups[-1][1])
    remat = request.fixed.remat or step.remat
    plan = PodPlan.on(shape, step.parallel, step.accumulate, remat, step.shard, stages)
    costed = cost_step(dataclasses.replace(request, parallel=(step.parallel,)), plan)
    return costed.terms.products + costed.terms.tensor_exposed if costed else None
