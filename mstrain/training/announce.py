"""What a run says before it trains: model, mesh, plan, data, how MFU is counted, and the memory it needs."""

import typing

import jax
from jax.sharding import Mesh

from mstrain.models.plan import ModelPlan
from mstrain.models.transformer import count_parameters

if typing.TYPE_CHECKING:
    from mstrain.training.run import Run

MFU_FORMULA = (
    "(6 x multiplying parameters + 12 x layers x heads x head width x seq) x tokens / seconds / peak"
)


def announce(run: "Run") -> None:
    """Prints the run's choices and, once the step is compiled, its memory."""
    mesh, model = run.module.plan.mesh, run.module.model
    device, train, validation = jax.devices()[0], run.corpus.train, run.corpus.validation
    kind = "emulated CPU devices" if device.platform == "cpu" else device.device_kind
    peak = f"{run.peak / 1e12:,.0f} TFLOP/s per device" if run.peak else "n/a, so MFU is n/a"
    lines = {
        "Model": f"{model.name}: {count_parameters(model):,} parameters, {model.layers} layers",
        "Mesh": f"{describe_mesh(mesh)} (data x row x col): {mesh.size} {kind}",
        "Plan": describe(run.module.plan),
        "Data": f"{run.config.data.source}: {train.num_tokens:,} training tokens, "
        f"{validation.num_tokens:,} validation tokens",
        "MFU": f"{MFU_FORMULA}; peak {peak}",
    }
    for name, text in lines.items():
        run.console.print(f"[bold]{name:7}[/]{text}")
    with run.console.status("Compiling the step"):
        run.console.print(f"[bold]{'Memory':7}[/]{run.memory}")


def describe_mesh(mesh: Mesh) -> str:
    """Sizes along `data`, `row` and `col`."""
    return "x".join(map(str, mesh.devices.shape))


def describe(plan: ModelPlan) -> str:
    """One line: which layers run which algorithm, dataflow and slice count."""
    parts, first = [], 0
    for block, count in plan.groups:
        halves = []
        for name, pair in (("attention", block.attention), ("mlp", block.mlp)):
            into, out = pair.into, pair.out
            slices = f" S={into.slices},{out.slices}" if into.algorithm == "meshslice" else ""
            halves.append(f"{name} {into.algorithm} {into.dataflow},{out.dataflow}{slices}")
        layers = f"layer {first}" if count == 1 else f"layers {first}-{first + count - 1}"
        parts.append(f"{layers}: {'; '.join(halves)}")
        first += count
    return " | ".join(parts)
