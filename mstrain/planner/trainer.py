"""From a plan to the `train.py` line that runs it, and the file that carries it."""

import dataclasses
import json
from pathlib import Path

from mstrain.models.zoo import load_preset
from mstrain.planner.cost import Costed
from mstrain.planner.request import PlanRequest
from mstrain.planner.search import PodResult

PLAN_FILE = "plan.json"


def train_keys(plan) -> dict[str, str | int]:
    """The keys of train.py that `plan=FILE` supplies."""
    return {"mesh": plan.mesh, "parallel": plan.algorithm, "accumulate": plan.microbatches, "remat": plan.remat}


def model_keys(request: PlanRequest) -> dict:
    """model=NAME, and the fields in which the model differs from that preset."""
    preset = dataclasses.asdict(load_preset(request.model.name))
    changed = {name: value for name, value in dataclasses.asdict(request.model).items() if value != preset[name]}
    texts = {name: "null" if value is None else str(value) for name, value in changed.items()}
    return {"model": request.model.name, **{f"model.{name}": text for name, text in texts.items()}}


def train_line(request: PlanRequest, plan) -> str:
    """The command that runs `plan`, every key spelled out."""
    keys = {
        **model_keys(request),
        **train_keys(plan),
        "batch": request.batch,
        "seq": request.seq,
        "dtype": request.dtype,
    }
    return f"python train.py {_spelled(keys)}"


def _spelled(keys: dict) -> str:
    return " ".join(f"{key}={value}" for key, value in keys.items())


def write_plan(request: PlanRequest, result: PodResult, folder: Path) -> Path:
    """plan.json: the winner, and the best plan that train.py can run with its keys (null where there is
    none).
    """
    trainable = result.trainable
    document = {
        "model": request.model.name,
        "cluster": request.pod.name,
        "batch": request.batch,
        "seq": request.seq,
        "plan": result.best.plan.flat(),
        "step_seconds": result.best.seconds,
        "why_not_trainable": result.best.plan.why_not_trainable(),
        "train": train_keys(trainable.plan) if trainable else None,
        "train_step_seconds": trainable.seconds if trainable else None,
    }
    path = folder / PLAN_FILE
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return path


def closing_lines(request: PlanRequest, result: PodResult, path: Path) -> list[str]:
    """What train.py can run, and what it cannot and why."""
    lines = []
    if result.best is not result.trainable:
        lines.append(
            f"The best plan, {result.best.plan.name}, is not for train.py: {result.best.plan.why_not_trainable()}."
        )
    if result.trainable is None:
        if (stages := request.fixed.pipeline or 1) > 1:
            return [*lines, f"train.py has no pipeline. Drop pipeline={stages} for a plan that it can run."]
        return [
            *lines,
            "No plan that train.py can run fits: type pipeline=1 to see why, then a larger cluster= or batch=.",
        ]
    if result.best is not result.trainable:
        lines.append(f"The best that train.py runs takes {slower(result.trainable, result.best)}.")
    return [
        *lines,
        f"This file: python train.py {_spelled(model_keys(request))} batch={request.batch} seq={request.seq} "
        f"plan={path}",
        train_line(request, result.trainable.plan),
    ]


def slower(costed: Costed, best: Costed) -> str:
    return f"{1e3 * costed.seconds:.1f} ms a step, {100 * (costed.seconds / best.seconds - 1):.1f} % more"
