"""What a training loop of one's own needs: state, compiled step and batches (`mstrain.trainer`)."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from mstrain.commands.recorded import run_config
from mstrain.commands.train import load_config
from mstrain.data import Batch, TrainBatches
from mstrain.training.feed import Feed
from mstrain.training.prepare import prepare
from mstrain.training.resume import new_state, newest_state

_OF_COMMAND = ("check", "target", "wandb", "coordinator", "processes", "process")  # what no part of a Trainer reads


class Trainer(NamedTuple):
    """The three parts of a training loop.

    Attributes:
      state: {"step", "params", "optimizer"}, on the mesh.
      step: `step(state, batch) -> (state, metrics)`.
      feed: `feed(k)`, the batch of step k + 1.
    """

    state: dict[str, Any]
    step: Callable[[dict[str, Any], Any], tuple[dict[str, Any], dict[str, jax.Array]]]
    feed: Feed[TrainBatches]


def make_trainer(keys: list[str]) -> Trainer:
    """The trainer of `mstrain.trainer`, whose documentation has the arguments."""
    given = {key: value for key, _, value in (argument.partition("=") for argument in keys)}
    for key in _OF_COMMAND:
        if given.get(key, "null") not in ("null", "false"):
            raise ValueError(f"{key}={given[key]} has no effect on mstrain.trainer. Remove it, or run mstrain train.")
    with tempfile.TemporaryDirectory() as folder:
        recorded = given.get("run_dir")
        if recorded is None:
            config = load_config([*keys, f"run_dir={Path(folder) / 'run'}"])
        else:
            config = run_config(recorded, [key for key in keys if not key.startswith("run_dir=")])
        run = prepare(config)
        state = new_state(run) if recorded is None else newest_state(run)
    feed, vocab_size = run.feed, run.module.model.known_vocab_size
    assert run.compiled_step  # here, before the first step

    def step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        return run.step(state, batch if isinstance(batch, Batch) else feed.place(batch, vocab_size))

    return Trainer(state, step, feed)
