"""What a life of a run begins with.

Precedence: the newest good checkpoint in `run_dir`, or a newer one that the hosts saved locally; otherwise the parameters of the run named by `init_from`;
otherwise weights drawn from `seed`. A damaged checkpoint is set aside and the next older one is used.
"""

from pathlib import Path

import jax

from mstrain.checkpoints.checkpoints import Checkpoints
from mstrain.checkpoints.local import LocalCheckpoints
from mstrain.mesh import shape_of
from mstrain.models.parameters import compile_from_canonical
from mstrain.program.step import State, init_state
from mstrain.training.run import Run

DEFINES_BATCHES = ("seed", "batch", "seq", "corpus")
FORMAT = 1  # of what a checkpoint holds; a reader refuses a higher one


def begin(run: Run, checkpoints: Checkpoints, local: LocalCheckpoints | None = None) -> tuple[State, int]:
    """The state to start from and the number of steps it has behind it.

    Raises ValueError when there are checkpoints and none can be used.
    """
    steps, say = checkpoints.steps, run.console.print
    for step in steps:
        if local and (found := local.resume(above=step)):
            return _announce_local(run, local, *found)
        damage = _damage(run, checkpoints, step)
        if not damage:
            if step != steps[0]:
                lost = f"{steps[0] - step} steps since the good checkpoint of step {step}"
                say(f"[yellow]Resume:[/] {lost} are made again.")
            if local:
                local.drop_after(step)
            return _resume(run, checkpoints, step), step
        place = checkpoints.set_aside(step)
        run.job.barrier("damaged checkpoint set aside")
        checkpoints.reload()
        say(f"[yellow]Checkpoint {step} is damaged:[/] {'; '.join(damage[:3])}. It is now {place}.")
    if local and (found := local.resume(above=0)):
        return _announce_local(run, local, *found)
    if steps:
        raise ValueError(
            f"No checkpoint of {run.config.run_dir} can be read; what is left of them is in its folder "
            "damaged/. Type another run_dir=, or delete this one to begin anew."
        )
    if run.config.compile_cache:  # so that not even the first restart compiles anything
        compile_from_canonical(run.module)
    if run.config.init_from:
        return _from_another(run), 0
    return init_state(run.module, run.optimizer, run.config.seed), 0


def _announce_local(
    run: Run, local: LocalCheckpoints, state: State, step: int, lost: list[int]
) -> tuple[State, int]:
    local.drop_after(step)
    copied = f"; copies replace what {', '.join(map(run.job.name, lost))} lost" if lost else ""
    run.console.print(
        f"[bold]Resume[/] after step {step} from the hosts' own {run.config.checkpoint.local_dir}{copied}"
    )
    return state, step


def facts(run: Run) -> dict:
    """What a checkpoint tells of its run; DEFINES_BATCHES decide what batch k is."""
    config = run.config
    return {
        "format": FORMAT,
        "seed": config.seed,
        "batch": config.batch,
        "seq": config.seq,
        "corpus": run.corpus.digest,
        "mesh": str(shape_of(run.module.plan.mesh)),
        "processes": run.job.processes,
        "jax": jax.__version__,
    }


def _resume(run: Run, checkpoints: Checkpoints, step: int) -> State:
    before, now = checkpoints.facts(step), facts(run)
    _check_format(before, run.config.run_dir)
    state = checkpoints.restore(step, run.module, run.optimizer)
    changed = [name for name in DEFINES_BATCHES if before.get(name) != now[name]]
    if changed:
        run.console.print(
            f"[yellow]Resume:[/] {', '.join(changed)} changed since step {step}: later batches are not those "
            "that the uninterrupted run would have seen."
        )
    run.console.print(
        f"[bold]Resume[/] after step {step} of {run.config.run_dir}, saved on mesh {before.get('mesh')}"
    )
    return state


def _damage(run: Run, checkpoints: Checkpoints, step: int) -> list[str]:
    """Problems found by all hosts together; each reads its share of the files."""
    own = checkpoints.damage(step, run.job.process, run.job.processes)
    seconds = checkpoints.seconds_to_check(step, run.job.processes)
    return [line for text in run.job.gather("damage", "\n".join(own), seconds) for line in text.split("\n") if line]


def _from_another(run: Run) -> State:
    folder = Path(run.config.init_from) / "checkpoints"
    if not folder.is_dir():
        raise ValueError(
            f"init_from={run.config.init_from} has no checkpoints. Type the run_dir of a run that has saved."
        )
    others = Checkpoints(folder, keep=None)
    try:
        step = next((step for step in others.steps if not _damage(run, others, step)), None)
        if step is None:
            raise ValueError(
                f"init_from={run.config.init_from} has no checkpoint that can be read. Type another run."
            )
        _check_format(others.facts(step), run.config.init_from)
        state = init_state(run.module, run.optimizer, run.config.seed)
        params = others.restore_parameters(step, run.module)
    finally:
        others.close()
    run.console.print(f"[bold]Begin[/] with the parameters of step {step} of {run.config.init_from}")
    return {**state, "params": params}


def _check_format(before: dict, directory: str) -> None:
    version = before.get("format", FORMAT) if isinstance(before, dict) else None
    if not isinstance(version, int):
        raise ValueError(f"The checkpoints of {directory} are not mstrain's. Type another run_dir=.")
    if version > FORMAT:
        raise ValueError(
            f"The checkpoints of {directory} were written by a newer mstrain (format {version}, this one "
            f"reads {FORMAT}). Update mstrain, or type another run_dir=."
        )
