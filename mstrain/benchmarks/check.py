"""train.py target=SLICE check=true: memory and predicted time of the training step on an absent TPU slice."""

import contextlib
import dataclasses
import math
import time

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from mstrain.benchmarks.comparison import duration
from mstrain.benchmarks.layer_kinds import seconds_by_kind
from mstrain.benchmarks.remedies import Remedies, Remedy
from mstrain.compiler import Compiled, DoesNotFit, Target, compile_program, make_target, predict, tpu_slice_devices
from mstrain.hardware import TpuSlice, mfu, parse_target
from mstrain.hardware.pod import pod_of
from mstrain.mesh import MeshShape, shape_of
from mstrain.models.config import ModelConfig
from mstrain.models.description import describe_plan
from mstrain.models.flops import training_flops_per_token
from mstrain.models.parameters import describe_sharding
from mstrain.models.remat import AUTO, cheapest_that_fits
from mstrain.models.transformer import Transformer
from mstrain.models.zoo import BYTES
from mstrain.program.dtype import dtype_on
from mstrain.program.memory import GIB
from mstrain.program.step import abstract_state
from mstrain.program.step_config import StepConfig
from mstrain.training import tuned
from mstrain.training.config import RunConfig

QUIET = Console(quiet=True)


@dataclasses.dataclass(frozen=True)
class Step:
    """The training step of a configuration with its plan for an absent TPU slice."""

    config: RunConfig
    target: Target
    module: Transformer

    @property
    def state_bytes(self) -> dict[str, int]:
        """Bytes of weights and of the optimizer's moments per device."""
        state = abstract_state(self.module, self._optimizer)
        sizes = {name: _shard_bytes(state[name]) for name in ("params", "optimizer")}
        return {"weights (float32)": sizes["params"], "optimizer moments": sizes["optimizer"]}

    @property
    def _step(self) -> StepConfig:
        return self.config.step_config(self.module.model, self.module.dtype)

    @property
    def _optimizer(self):
        return self._step.make_optimizer(self.config.seed)

    def compile(self) -> Compiled:
        """Compiles the step; raises DoesNotFit if a device has too little memory."""
        hbm, state = self.target.tpu_slice.chip.hbm_bytes, sum(self.state_bytes.values())
        if hbm and state > hbm:
            raise DoesNotFit(f"weights and moments alone need {_of(state, hbm)} of a device", state, hbm)
        program = compile_program(self._step.program(self.module, self._optimizer, self.config.seed), self.target)
        program.check_fits()
        return program


def check(config: RunConfig) -> int:
    """Prints memory and predicted time and returns 0, or prints the smallest change that fits and returns 1."""
    console = Console(highlight=False)
    step = plan_step(config, console)
    console.print(f"[bold]Target[/] {config.target}: mesh {shape_of(step.target.mesh)}")
    console.print(f"[bold]Plan[/]   {describe_plan(step.module.plan, config.batch // config.accumulate)}")
    if sharding := describe_sharding(step.module):
        console.print(f"[bold]Shard[/]  {sharding}")
    try:
        with console.status("Compiling the step"):
            step, program = _compiled(step)
    except DoesNotFit as error:
        reason = str(error).partition(" Type ")[0]  # _propose prints what to type
        console.print(f"[bold red]Does not fit:[/] {reason}", soft_wrap=True)
        return _propose(step.config, error, console)
    console.print(_memory_table(step, program))
    console.print(*_cost_lines(step, program), sep="\n")
    return 0


def _compiled(step: Step) -> tuple[Step, Compiled]:
    """The compiled step, with the remat that fits for remat=auto; raises DoesNotFit."""
    if step.config.remat != AUTO:
        return step, step.compile()
    found: dict[str, tuple[Step, Compiled]] = {}

    def with_remat(remat: str) -> Step:
        config, module = (dataclasses.replace(part, remat=remat) for part in (step.config, step.module))
        return dataclasses.replace(step, config=config, module=module)

    def fits(remat: str) -> bool:
        with contextlib.suppress(DoesNotFit):
            found[remat] = with_remat(remat), with_remat(remat).compile()
        return remat in found

    remat = cheapest_that_fits(fits)
    return found.get(remat) or (with_remat(remat), with_remat(remat).compile())


def _propose(config: RunConfig, error: DoesNotFit, console: Console) -> int:
    """Prints every change that is tried and the one that fits; returns the exit code 1."""
    begin = time.monotonic()

    def report(text: str) -> None:
        console.print(f"  {duration(time.monotonic() - begin)}  {text}", soft_wrap=True)

    with console.status("Looking for the smallest change that fits"):
        remedy = smallest_change(config, error, report)
    if remedy:
        cost = f"predicted {remedy.seconds:.4g} s a step"
        console.print(f"It fits with: {remedy.keys} ({cost})", soft_wrap=True)
    else:
        console.print("None of the changes that were tried fits (remat=, accumulate=, larger TPU slices).")
    return 1


def plan_step(config: RunConfig, console: Console = QUIET) -> Step:
    """Plans the step for `config.target`; raises ValueError for an illegal plan or a missing compiler."""
    tpu_slice, model = _slice_of(config), _with_vocab_size(config)
    tpu_slice_devices(tpu_slice)  # before JAX initializes its backends, because it silences the compiler's log
    dtype = dtype_on("tpu", config.dtype)
    config = tuned.with_plan(config, model, pod_of(tpu_slice, tpu_slice.devices), dtype, console)
    if config.tune == "compile":
        config = tuned.tuned(config, model, tpu_slice, dtype, make_target, console)
    mesh = best_mesh(config, model, tpu_slice) if config.mesh == "auto" else config.mesh
    target = make_target(tpu_slice, mesh)
    step = config.step_config(model, dtype)
    return Step(config, target, step.module(step.plan(target.mesh, tpu_slice)))


def smallest_change(config: RunConfig, error: DoesNotFit, report=lambda text: None) -> Remedy | None:
    """The smallest change with which the step fits (`mstrain.benchmarks.remedies`); None if nothing helps."""

    def attempt(changed: RunConfig) -> float:
        return predict(plan_step(changed).compile()).seconds

    def state(changed: RunConfig) -> float:
        return sum(plan_step(changed).state_bytes.values())

    def larger(target: str) -> RunConfig | None:
        changed = dataclasses.replace(config, target=target, mesh="auto")
        try:
            mesh = best_mesh(changed, _with_vocab_size(config), parse_target(target))
        except ValueError:
            return None
        return dataclasses.replace(changed, mesh=str(mesh))

    search = Remedies(attempt, state, _slice_of(config).chip.hbm_bytes, report)
    search.learn(config, error)
    return search.smallest(config, larger)


def best_mesh(config: RunConfig, model: ModelConfig, tpu_slice: TpuSlice) -> MeshShape:
    """The mesh of train.py mesh=auto on the TPU slice."""
    pod = pod_of(tpu_slice, tpu_slice.devices)
    return tuned.best_mesh(config, model, pod, dtype_on("tpu", config.dtype)).shape


def _slice_of(config: RunConfig) -> TpuSlice:
    assert config.target is not None, "check=true needs target="
    return parse_target(config.target)


def _with_vocab_size(config: RunConfig) -> ModelConfig:
    """The model with its vocab_size, without reading a corpus; raises ValueError if only the tokenizer has it."""
    if config.model.vocab_size is not None:
        return config.model
    if config.tokenizer != "bytes" and config.vocab_size is None:
        raise ValueError(
            f"check=true reads no corpus, so the vocabulary of tokenizer={config.tokenizer} is not known. "
            "Type model.vocab_size=50257, or the size of its vocabulary."
        )
    return dataclasses.replace(config.model, vocab_size=config.vocab_size or BYTES)


def _shard_bytes(tree) -> int:
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def _of(size: float, hbm: float) -> str:
    return f"{size / GIB:.1f} of {hbm / GIB:.1f} GiB"


def _memory_table(step: Step, program: Compiled) -> Table:
    hbm = step.target.tpu_slice.chip.hbm_bytes
    memory, state = program.memory, step.state_bytes
    parts = state | {
        "batch and padding": memory.arguments - sum(state.values()),
        "results beside the state": memory.outputs,
        "gradients, activations, slices": memory.temporaries,
        "program": memory.code,
    }
    table = Table("memory of a device", "GiB", title="Fits", title_justify="left", box=None)
    for name, size in parts.items():
        table.add_row(name, f"{size / GIB:.3f}")
    table.add_row("[bold]peak[/]", _of(memory.peak, hbm) if hbm else f"{memory.peak / GIB:.3f}")
    return table


def _cost_lines(step: Step, program: Compiled) -> list:
    schedule, config = predict(program), step.config
    devices, tokens = step.target.mesh.size, config.tokens
    flops = tokens * training_flops_per_token(step.module.model, config.seq)
    peak = step.target.tpu_slice.chip.peak(jnp.dtype(step.module.dtype).name)
    share = mfu(flops, schedule.seconds, devices, peak)
    low, high = schedule.bounds
    table = Table("layer", "compute ms", "exposed ms", "share", box=None)
    for kind, (compute, exposed) in seconds_by_kind(program, schedule).items():
        part = (compute + exposed) / schedule.seconds
        table.add_row(kind, f"{1e3 * compute:.2f}", f"{1e3 * exposed:.2f}", f"{part:.1%}")
    return [
        "",
        f"Predicted from the compiled schedule, not measured ({program.seconds:.0f} s to compile)",
        f"step {schedule.seconds:.4g} s (low {low:.4g}, high {high:.4g}), "
        f"{tokens / schedule.seconds:,.0f} tokens/s, MFU "
        + ("n/a" if share is None else f"{share:.1%}")
        + f", exposed communication {schedule.exposed_fraction:.1%}"
        + ("" if schedule.hidden is None else f", hidden {schedule.hidden:.0%} of the collectives' time"),
        "MFU = model FLOPs (no recomputation) / (seconds x devices x peak of "
        f"{'unknown' if peak is None else f'{peak / 1e12:g} TFLOP/s'})",
        table,
    ]
