"""CPU devices that say they are GPUs, and a loss curve of them.

    python -m tests.models.as_gpu [STEPS]

trains a small GPT on the source of Python's standard library in float32 and bf16, with what other platforms compute and
with what GPUs compute, and prints how far losses are from float32's. Attention is XLA's in all four.
"""

import os
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from mstrain.gemm import Grid
from mstrain.layers.norm import NormConfig
from mstrain.mesh import make_mesh, parse_mesh
from mstrain.models.config import ModelConfig
from mstrain.program.optimizer import OptimizerConfig, schedule_of
from mstrain.program.step import init_state
from mstrain.program.step_config import StepConfig

BATCH, SEQ = 16, 64  # fewer than cuDNN's 128 tokens
MODEL = ModelConfig(layers=2, width=128, heads=4, vocab_size=256, context=SEQ, init_scale=0.08)


def as_gpu(patch: pytest.MonkeyPatch) -> None:
    """Programs traced from now on are those for GPUs."""
    patch.setattr(Grid, "platform", property(lambda self: "gpu"))
    patch.setattr(NormConfig, "on_gpu", property(lambda self: True))


def curve(dtype: str, steps: int) -> np.ndarray:
    """Losses of the first `steps` steps."""
    mesh, rng = make_mesh(parse_mesh("1x1")), np.random.default_rng(0)
    config = StepConfig(MODEL, BATCH, SEQ, dtype=dtype, optimizer=OptimizerConfig(learning_rate=2e-3))
    module, optimizer = config.module(config.plan(mesh, None)), config.make_optimizer()
    program = config.program(module, optimizer)
    step, state, losses = program.compile(), init_state(module, optimizer, 0), []
    _, batch, schedule = program.arguments
    rates = jax.device_put(schedule_of(config.optimizer, steps), schedule.sharding)
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
    for _ in range(steps):
        ids = np.stack([text[at : at + SEQ + 1] for at in rng.integers(0, len(text) - SEQ, BATCH)])
        tokens = jax.device_put(ids.astype(np.int32)[None], batch.tokens.sharding)
        state, metrics = step(state, batch._replace(tokens=tokens), rates)
        losses.append(float(metrics["loss"]))
    return np.array(losses)


def main(steps: int = 200) -> None:
    exact = curve("float32", steps)
    print(f"float32: mean of the last tenth {exact[-steps // 10 :].mean():.4f}")
    for dtype, gpu in (("float32", True), ("bfloat16", False), ("bfloat16", True)):
        with pytest.MonkeyPatch.context() as patch:
            if gpu:
                as_gpu(patch)
            losses = curve(dtype, steps)
        off = np.abs(losses - exact)
        last = losses[-steps // 10 :].mean()
        print(f"{dtype}{' as a GPU' * gpu}: {last:.4f}, off by {off.mean():.2g} on average and {off.max():.2g} at most")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
