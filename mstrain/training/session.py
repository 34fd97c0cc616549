"""One life of a run: make or resume its state, train to the last step, say what came of it.

Precedence: a checkpoint in `run_dir` is resumed; otherwise weights are initialised from `seed`.
"""

import time
from pathlib import Path

import jax
from omegaconf import OmegaConf

from mstrain.checkpoints import Checkpoints
from mstrain.config import to_dict
from mstrain.training import loop
from mstrain.training.evaluate import Evaluator
from mstrain.training.optimizer import learning_rate
from mstrain.training.profiler import profile_hooks
from mstrain.training.reporter import Reporter
from mstrain.training.run import Run
from mstrain.training.step import State, init_state
from mstrain.training.summary import summarise

DEFINES_BATCHES = ("seed", "batch", "seq", "corpus")


def train(run: Run) -> int:
    """Trains `run` to its last step in its run directory; returns the exit code."""
    config, directory = run.config, Path(run.config.run_dir)
    if jax.process_index() == 0:
        directory.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(directory / "checkpoints", config.checkpoint.keep)
    try:
        state, done = _begin(run, checkpoints)
        if done >= config.steps:
            run.console.print(f"{directory} has all {done} steps. Type steps= above {done}, or another run_dir=.")
            return 0
        if jax.process_index() == 0:
            (directory / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(to_dict(config))))
        steps = range(done + 1, config.steps + 1)
        reporter = Reporter(directory, steps, config.log_every, _per_step(run), run.console)
        evaluator = Evaluator(run, reporter)
        hooks = [
            *profile_hooks(config.profile, directory, steps),
            loop.every(config.eval.every, config.steps, evaluator),
            loop.every(config.checkpoint.every, config.steps, _saver(run, checkpoints)),
        ]
        begun = time.perf_counter()
        with reporter:
            state = loop.train(run.compiled_step, run.feed, state, steps, hooks, reporter)
        checkpoints.wait()
        summarise(run, state, evaluator, reporter, time.perf_counter() - begun)
        return 0
    finally:
        checkpoints.close()


def _begin(run: Run, checkpoints: Checkpoints) -> tuple[State, int]:
    """The state to start from and the number of steps it has behind it."""
    step, say = checkpoints.latest, run.console.print
    if step is None:
        return init_state(run.module, run.optimizer, run.config.seed), 0
    state = checkpoints.restore(step, run.module, run.optimizer)
    before, now = checkpoints.facts(step), _facts(run)
    changed = [name for name in DEFINES_BATCHES if before.get(name) != now[name]]
    if changed:
        say(
            f"[yellow]Resume:[/] {', '.join(changed)} changed since step {step}: later batches are not those the "
            "uninterrupted run would have seen."
        )
    say(f"[bold]Resume[/] after step {step} of {run.config.run_dir}, saved on mesh {before['mesh']}")
    return state, step


def _saver(run: Run, checkpoints: Checkpoints):
    facts = _facts(run)
    return lambda step, state: checkpoints.save(step, state, run.module, facts)


def _facts(run: Run) -> dict:
    """What a checkpoint tells of its run; the first four decide what batch k is."""
    config, mesh = run.config, run.module.plan.mesh
    return {
        "seed": config.seed,
        "batch": config.batch,
        "seq": config.seq,
        "corpus": run.corpus.digest,
        "mesh": "x".join(str(size) for size in mesh.shape.values()),
        "jax": jax.__version__,
    }


def _per_step(run: Run):
    """Fields of a logged step that follow from its number and duration."""
    schedule = learning_rate(run.config.optimizer, run.config.steps)
    tokens = run.config.batch * run.config.seq

    def fields(step: int, seconds: float) -> dict:
        return {
            "learning_rate": float(schedule(step - 1)),
            "tokens_per_second": tokens / seconds,
            "mfu": run.mfu(seconds),
        }

    return fields
