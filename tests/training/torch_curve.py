"""The default run beside a GPT of the same size in PyTorch: the same batches, schedule, clipping and AdamW.

`python -m tests.training.torch_curve FILE who=mstrain|torch|torch_from_mstrain seeds=0,1 [key=value ...]` trains on one
device and appends a row for each seed to the CSV file FILE: the training loss of the first and of the last step, and
the validation loss. Rows that FILE has are not trained again. `torch` draws its own initial weights, all with the
deviation model.init_scale; `torch_from_mstrain` copies those of mstrain.
"""

import csv
import dataclasses
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

from mstrain.benchmarks.peers.torch_model import Model
from mstrain.benchmarks.peers.torch_step import groups_of
from mstrain.cli.fields import own_config
from mstrain.commands.train import load_config
from mstrain.models.parameters import init_canonical
from mstrain.program.optimizer import rate_of, schedule_of
from mstrain.training.evaluate import Evaluator
from mstrain.training.prepare import prepare
from mstrain.training.resume import new_state
from mstrain.training.run import Run

COLUMNS: tuple[str, ...] = ("who", "keys", "seed", "first", "last", "validation")
Losses = tuple[list[float], float]  # of training by step, of validation


@dataclasses.dataclass(frozen=True)
class Asked:
    """Who trains: `mstrain`, `torch` or `torch_from_mstrain`; on which `seeds`, separated by commas."""

    who: str = "mstrain"
    seeds: str = "0"


def by_mstrain(run: Run) -> Losses:
    state, losses = new_state(run), []
    for k in range(run.config.steps):
        state, metrics = run.step(state, run.feed(k))
        losses.append(metrics["loss"])
    evaluator = Evaluator(run.config.eval, run.module, run.corpus.validation, run.validation_feed)
    return [float(loss) for loss in losses], evaluator.measure(state["params"])


def by_torch(run: Run, ours: bool) -> Losses:
    """`ours`: from the initial weights of mstrain."""
    config = run.config
    torch.manual_seed(config.seed)
    model = Model(run.module.model, config.seq)
    if ours:
        copy(init_canonical(run.module, config.seed), model)
    own = config.optimizer
    optimizer = torch.optim.AdamW(groups_of(model, own.weight_decay), betas=(own.b1, own.b2), eps=own.epsilon)
    schedule, losses = schedule_of(own, config.steps), []
    for k in range(config.steps):
        for group in optimizer.param_groups:
            group["lr"] = float(rate_of(own.schedule, schedule, np.int32(k)))
        loss = loss_of(model, run.feed, k)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), own.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        validation = [loss_of(model, run.validation_feed, i).item() for i in range(config.eval.batches)]
    return losses, float(np.mean(validation))


def loss_of(model: Model, feed, k: int) -> torch.Tensor:
    tokens = torch.from_numpy(np.array(feed(k).tokens).reshape(-1, feed.abstract.tokens.shape[-1])).long()
    return model(tokens[:, :-1], tokens[:, 1:])


def copy(params, model: Model) -> None:
    """Canonical parameters of a tied GPT with rotary positions into `model`; kernels are [in, out] here."""

    def put(into, values):
        with torch.no_grad():
            into[: len(values)] = torch.from_numpy(np.array(values))

    def put_norm(into, norm):
        put(into.weight, norm["scale"])
        put(into.bias, norm["bias"])

    def put_dense(into, dense):
        put(into.weight, dense["kernel"].T)
        put(into.bias, dense["bias"])

    put(model.table.weight, params["embedding"]["table"])
    put_norm(model.norm, params["final_norm"])
    blocks: Any = model.blocks
    for i, block in enumerate(blocks):
        layer = jax.tree.map(lambda x, i=i: x[i], params["blocks_0"])
        put_norm(block.first, layer["attention_norm"])
        put_norm(block.second, layer["mlp_norm"])
        put_dense(block.attention.qkv, layer["attention"]["qkv"])
        put_dense(block.attention.out, layer["attention"]["out"])
        put_dense(block.mlp.up, layer["mlp"]["up"])
        put_dense(block.mlp.down, layer["mlp"]["down"])


TRAINERS: dict[str, Callable[[Run], Losses]] = {
    "mstrain": by_mstrain,
    "torch": lambda run: by_torch(run, False),
    "torch_from_mstrain": lambda run: by_torch(run, True),
}


def main(file: Path, arguments: list[str]) -> None:
    asked, keys = own_config(Asked, arguments)
    known = list(csv.reader(file.open())) if file.exists() else [list(COLUMNS)]
    for seed in str(asked.seeds).split(","):
        facts = [asked.who, " ".join(keys), seed]
        if any(row[:3] == facts for row in known):
            continue
        with tempfile.TemporaryDirectory() as folder:
            run = prepare(load_config(["mesh=1x1", f"seed={seed}", f"run_dir={folder}/run", *keys]))
        training, validation = TRAINERS[asked.who](run)
        known.append([*facts, *(f"{loss:.5f}" for loss in (training[0], training[-1], validation))])
        print(*known[-1], flush=True)
        with file.open("w", newline="") as rows:
            csv.writer(rows, lineterminator="\n").writerows(known)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
