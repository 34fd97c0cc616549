"""Prints the choices of a run before training: model, mesh, plan, data, MFU formula and memory."""

import jax

from mstrain.mesh import shape_of
from mstrain.models.description import describe_plan
from mstrain.models.flops import flops_formula
from mstrain.models.parameters import describe_sharding
from mstrain.models.size import count_parameters
from mstrain.training.run import Run


def announce(run: Run) -> None:
    """Prints the run's choices and, once the step is compiled, its memory."""
    mesh, model = run.module.plan.mesh, run.module.model
    device, train, validation = jax.devices()[0], run.corpus.train, run.corpus.validation
    kind = "emulated CPU devices" if device.platform == "cpu" else device.device_kind
    peak = f"{run.peak / 1e12:,.0f} TFLOP/s per device" if run.peak else "n/a, so MFU is n/a"
    lines = {
        "Model": f"{model.name}: {count_parameters(model):,} parameters, {model.layers} layers",
        "Mesh": f"{shape_of(mesh)}: {mesh.size} {kind}",
        "Plan": describe_plan(run.module.plan, run.config.batch // run.config.accumulate),
        "Shard": describe_sharding(run.module),
        "Data": f"{run.config.data.source}: {train.num_tokens:,} training tokens, "
        f"{validation.num_tokens:,} validation tokens; {run.corpus.described}{_repetition(run)}",
        "MFU": f"({flops_formula(model, run.config.seq)}) x tokens / seconds / peak; peak {peak}",
    }
    for name, text in lines.items():
        if text:
            run.console.print(f"[bold]{name:7}[/]{text}")
    with run.console.status("Compiling the step"):
        run.console.print(f"[bold]{'Memory':7}[/]{run.memory}")
    if run.prediction:
        run.console.print(f"[bold]{'Step':7}[/]predicted {run.prediction}")


def _repetition(run: Run) -> str:
    """How often the run reads its corpus, if more than once; a mixture and a stream repeat their parts differently."""
    config = run.config
    epochs = config.steps * config.tokens / run.corpus.train.num_tokens
    if epochs <= 1 or run.corpus.parts or run.corpus.stream:
        return ""
    return f"; {config.steps} steps read the training tokens {epochs:,.1f} times"
