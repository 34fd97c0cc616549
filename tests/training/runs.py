"""Small runs: their arguments and their files."""

import json
from pathlib import Path

import jax
import pytest

from mstrain.commands.train import load_config
from mstrain.training.prepare import prepare
from mstrain.training.run import Run
from tests.quick import QUICK

ARGUMENTS = [
    "model=tiny", "data=synthetic", "data.num_tokens=4096", "vocab_size=61", "seq=16", "batch=16", "dtype=f32",
    "optimizer.warmup=2", "eval.batches=2", "sample.tokens=0",
]  # fmt: skip


def make(directory: Path, *arguments: str) -> Run:
    """A prepared run in `directory`, its corpus beside it: compiled fast, on the mesh asked for.

    The suite emulates more devices than most meshes need; elsewhere they would become data-parallel replicas.
    """
    places = [f"run_dir={directory}", f"data.cache_dir={directory.parent / 'corpora'}"]
    keys = {argument.partition("=")[0] for argument in arguments}
    usual = [argument for argument in ARGUMENTS if argument.partition("=")[0] not in keys]
    assert jax.device_count() == 16  # makes them, before a mesh asks for fewer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mstrain.program.program.compiler_options", lambda chip, algorithm: QUICK)
        patch.setattr("mstrain.mesh.fit_to_devices", lambda shape, devices: shape)
        return prepare(load_config([*usual, *places, *arguments]))


def lines(directory: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]


def losses(directory: Path) -> list[float]:
    """Loss of each step; fails when a step is missing, doubled or out of order."""
    rows = lines(directory)
    assert [row["step"] for row in rows] == [*range(1, len(rows) + 1)]
    return [row["loss"] for row in rows]


def saved_steps(directory: Path) -> list[int]:
    return sorted(int(path.name) for path in (directory / "checkpoints").iterdir() if path.name.isdigit())
