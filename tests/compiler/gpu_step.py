"""Lower bounds on the time of the kernels of a training step that is compiled for a GPU that is not present.

    python -m tests.compiler.gpu_step h200 models="gpt3_1_3b gpt2" peers="mstrain flax" [batch=16 seq=2048]

needs `pip install "jax[cuda12]"` but no GPU, and takes about ten seconds per step. Peers are those of `python
benchmark.py bench=peers` that use JAX. Prints launches, bytes, FLOPs and milliseconds of each class of kernels. The
time of a kernel is the longer of its FLOPs at the peak FLOP/s and its bytes at the memory bandwidth of the chip: a
lower bound, which is not measured. `top=N` lists the N kernels with the longest times; `dump=FOLDER` writes the
programs to a folder; other keys are XLA options.
"""

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from mstrain.benchmarks.config import load
from mstrain.benchmarks.peers import flax_model, own
from mstrain.benchmarks.peers.compare import TOKENS
from mstrain.benchmarks.peers.own import random_tokens
from mstrain.benchmarks.peers.task import Task
from mstrain.benchmarks.presets import PEER_MODELS
from mstrain.compiler.topology import quiet
from mstrain.hardware import Chip, chip_named
from mstrain.models.config import ModelConfig
from mstrain.models.flops import training_flops_per_token
from mstrain.models.size import count_parameters
from mstrain.program.memory import GIB
from mstrain.program.program import text_of
from tests.compiler.arguments import read_arguments
from tests.compiler.gpu_kernels import Kernel, read_kernels, totals
from tests.compiler.gpu_target import absent_gpu

ADAMW = 28  # bytes per parameter: reads it, its gradient and two moments, writes it and the moments, in float32


@dataclasses.dataclass(frozen=True)
class Keys:
    """Models and shapes; the defaults are those of bench=peers."""

    models: str = PEER_MODELS
    peers: str = "mstrain flax"
    batch: int | None = None
    seq: int | None = None
    top: int = 0
    dump: str | None = None


def compile_step(task: Task, device, options: Mapping[str, Any]) -> jax.stages.Compiled:
    """The step of the peer `mstrain` or `flax`, compiled for a device that is not present."""
    if task.peer == "mstrain":
        return own.work_of(task, device).program.compile(options or None)
    start, step, _ = flax_model.build(task, "gpu")
    ids = jax.eval_shape(lambda: random_tokens(task))
    state = jax.eval_shape(start, ids)
    there = SingleDeviceSharding(device)
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), (state, ids))
    return step.lower(*arguments).compile(compiler_options=dict(options))


def describe(kernels: list[Kernel], chip: Chip, model: ModelConfig, batch: int, seq: int) -> list[str]:
    """A table with a line per class of kernels and their sum; then a lower bound of any step, and the highest MFU."""
    peak, bandwidth = chip.known_peak("bf16"), chip.number("hbm_bandwidth")
    lines = ["| kernels | launches | GB | TFLOPs | ms |", "|---|---|---|---|---|"]
    found = totals(kernels, peak, bandwidth)
    for kind, total in found.items():
        lines.append(_line(kind, total.launches, total.bytes, total.flops, total.seconds))
    sums = [sum(getattr(total, name) for total in found.values()) for name in ("launches", "bytes", "flops", "seconds")]
    lines.append(_line("**all**", *sums))
    causal, full = (batch * seq * training_flops_per_token(model, seq, kind) for kind in ("causal", "full"))
    floor = causal / peak + ADAMW * count_parameters(model) / bandwidth
    return [
        *lines, "",
        f"Lower bound of any step {1e3 * floor:.1f} ms: {causal / 1e12:.1f} TFLOPs (causal attention) at peak, then "
        f"{ADAMW} bytes for each of {count_parameters(model) / 1e9:.2f} billion parameters.",
        f"At most {full / peak / sums[-1]:.1%} MFU (full attention) with these kernels.",
    ]  # fmt: skip


def _line(kind: str, launches: int, moved: float, flops: float, seconds: float) -> str:
    return f"| {kind} | {launches} | {moved / 1e9:.2f} | {flops / 1e12:.2f} | {1e3 * seconds:.2f} |"


def largest(kernels: list[Kernel], chip: Chip, count: int) -> list[str]:
    """The kernels with the longest times, one per line."""
    peak, bandwidth = chip.known_peak("bf16"), chip.number("hbm_bandwidth")
    ordered = sorted(kernels, key=lambda kernel: -kernel.seconds(peak, bandwidth))[:count]
    return [
        f"{1e3 * k.seconds(peak, bandwidth):7.3f} ms {k.kind:12} x{k.launches:<4} {k.bytes / 1e6:8.1f} MB "
        f"{k.flops / 1e9:7.1f} GFLOPs {k.name} {k.scope[-80:]}"
        for k in ordered
    ]  # fmt: skip


def main(name: str, arguments: list[str]) -> None:
    keys, options = read_arguments(Keys, arguments)
    chip = chip_named(name)
    device = absent_gpu(chip)
    for model in load(["bench=peers", f"models={keys.models}"]).model_configs:
        seq = keys.seq or model.context
        batch = keys.batch or max(TOKENS // seq, 1)
        model = dataclasses.replace(model, context=max(model.context, seq))
        for peer in keys.peers.split():
            with quiet():
                compiled = compile_step(Task(peer, model, batch, seq), device, options)
            text, memory = text_of(compiled), compiled.memory_analysis()
            assert memory is not None, "XLA:GPU analyzes memory"
            if keys.dump:
                Path(keys.dump).mkdir(parents=True, exist_ok=True)
                (Path(keys.dump) / f"{peer}_{model.name}.hlo").write_text(text)
            kernels = read_kernels(text)
            whole = memory.argument_size_in_bytes + memory.temp_size_in_bytes
            title = f"{peer}, {model.name}, {batch} x {seq}, one {chip.name}"
            print(f"\n{title}: {whole / GIB:.1f} GiB (temporary {memory.temp_size_in_bytes / GIB:.1f})\n")
            print(*describe(kernels, chip, model, batch, seq), sep="\n")
            print(*largest(kernels, chip, keys.top), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
