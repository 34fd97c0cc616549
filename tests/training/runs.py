"""Small runs: their arguments, their files, and compilers that do not try hard."""

import json
from pathlib import Path

from mstrain.config import load_config
from mstrain.training.run import Run, prepare

ARGUMENTS = [
    "model=tiny", "data=synthetic", "data.num_tokens=4096", "vocabulary=61", "seq=16", "batch=16", "dtype=f32",
    "optimizer.warmup=2", "eval.batches=2", "sample.tokens=0",
]  # fmt: skip
TENSORBOARD = "tensorboard"


def make(directory: Path, *arguments: str) -> Run:
    """A prepared run in `directory`; its corpus lies beside it."""
    places = [f"run_dir={directory}", f"data.cache_dir={directory.parent / 'corpora'}"]
    keys = {argument.partition("=")[0] for argument in arguments}
    usual = [argument for argument in ARGUMENTS if argument.partition("=")[0] not in keys]
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
