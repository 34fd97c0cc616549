"""plan.json, which plan.py writes and train.py reads: the keys of a plan, or why train.py cannot run it."""

import dataclasses
import itertools
from pathlib import Path

from mstrain.fields import Fields
from mstrain.json_files import read_json, write_json
from mstrain.models.zoo import load_preset, preset_names
from mstrain.planner.request import PlanRequest
from mstrain.planner.search import PodResult
from mstrain.planner.trainer import spelled, train_keys

PLAN_FILE = "plan.json"
AUTO_PLAN = "auto"  # value of plan= instead of a file: the best plan for the devices present
DEFAULTS = {  # defaults of train.py that plan=auto replaces
    "accumulate": "1", "remat": "none", "shard": "none", "parallel": "meshslice", "parallel.algorithm": "meshslice",
}  # fmt: skip
KEYS = (  # keys of train.py that a plan file may contain
    "mesh", "parallel", "parallel.slices", "accumulate", "remat", "shard", "offload", "pipeline.schedule",
    "pipeline.interleave",
)  # fmt: skip


def model_keys(request: PlanRequest) -> dict:
    """The keys of train.py for the model: model=NAME, and every field in which it differs from that preset.

    For a model that is not a preset, NAME is the preset with the fewest different fields.
    """
    given, names = _flat(dataclasses.asdict(request.model)), preset_names()
    presets = [request.model.name] if request.model.name in names else names
    changed = {preset: given.items() - _flat(dataclasses.asdict(load_preset(preset))).items() for preset in presets}
    nearest = min(presets, key=lambda preset: len(changed[preset]))
    texts = {f"model.{name}": "null" if given[name] is None else str(given[name]) for name in dict(changed[nearest])}
    return {"model": nearest, **dict(sorted(texts.items()))}


def _flat(values: dict) -> dict:
    """Nested fields by their dotted keys, such as `latent.key_rank`."""
    inner = ({f"{name}.{key}": v for key, v in _flat(value).items()} if isinstance(value, dict) else {name: value}
             for name, value in values.items())  # fmt: skip
    return dict(itertools.chain.from_iterable(each.items() for each in inner))


def write_plan(request: PlanRequest, result: PodResult, folder: Path) -> Path:
    """Writes plan.json: the best plan, and the keys of the best plan that train.py can run (null if there is none)."""
    best, runs = result.best, result.trainable[0] if result.trainable else None
    document = {
        "model": model_keys(request)["model"],
        "cluster": request.pod.name,
        "batch": request.batch,
        "seq": request.seq,
        "plan": best.plan.flat(),
        "step_seconds": best.seconds,
        "uncertainty": best.uncertainty,
        "why_not_trainable": best.why_not_trainable,
        "train": train_keys(runs.plan, request.pod.slices) if runs else None,
        "train_step_seconds": runs.seconds if runs else None,
    }
    path = folder / PLAN_FILE
    write_json(document, path)
    return path


def closing_lines(request: PlanRequest, result: PodResult, path: Path) -> list[str]:
    """Lines that report whether train.py can run the best plan, and the commands for the best plan that it can run.

    The last line is a command that does not need the file.
    """
    best, lines = result.best, []
    if why := best.why_not_trainable:
        lines.append(f"train.py cannot run the best plan, {best.plan.name}: {why}.")
    if not result.trainable:
        fix = "type pipeline=1 context=1 shard=none to see why, then a larger cluster= or batch=."
        if (stages := request.fixed.pipeline or 1) > 1:
            fix = f"type schedule=1f1b shard=optimizer, or drop pipeline={stages}."
        return [*lines, f"No plan that train.py can run fits: {fix}"]
    runs = result.trainable[0]
    if why:
        more = 100 * (runs.seconds / best.seconds - 1)
        took = f"{1e3 * runs.seconds:.1f} ms per step, {more:.1f} % more"
        lines.append(f"The best plan that train.py can run takes {took}.")
    model = model_keys(request)
    step = {"batch": request.batch, "seq": request.seq, "dtype": request.dtype, **request.optimizer_keys}
    every = {**model, **train_keys(runs.plan, request.pod.slices), **step}
    file = f"With this file: python train.py {spelled({**model, **step, 'plan': path})}"
    return [*lines, file, f"python train.py {spelled(every)}"]


def plan_overrides(arguments: list[str]) -> list[str]:
    """The arguments that `plan=FILE` adds to the command-line `arguments`, except those that are given explicitly.

    Raises ValueError for a file that is not a plan, that train.py cannot run, or that was made for another model; and
    if plan=auto is given with the default value of a key that it chooses.
    """
    given = {key: value for key, _, value in (argument.partition("=") for argument in arguments)}
    if given.get("plan") in (None, "null"):
        return []
    if given["plan"] == AUTO_PLAN:
        if same := next(((key, value) for key, value in DEFAULTS.items() if given.get(key) == value), None):
            key, value = same
            name = "algorithm" if key.startswith("parallel") else key
            raise ValueError(
                f"plan=auto chooses every key that has its default value, such as {key}={value}. Remove it, or type "
                f"{name}={value} to plan.py, and type plan=FILE with the file that plan.py writes."
            )
        return []
    path = given["plan"]
    document = _read(path)
    if document.get("train") is None:
        why = document.get("why_not_trainable") or "it contains no plan for train.py"
        raise ValueError(f"plan={path}: {why}. Type pipeline=1 to plan.py, with a cluster= that is large enough.")
    keys = document["train"]
    unknown = sorted(set(keys) - set(KEYS))
    if unknown:
        raise ValueError(
            f"plan={path}: unknown key {unknown[0]!r}. The known keys are {', '.join(KEYS)}; run plan.py again."
        )
    if given.get("model") != document["model"]:
        raise ValueError(f"plan={path} was made for model {document['model']}. Type model={document['model']}.")
    return [f"{key}={value}" for key, value in keys.items() if key not in given]


def _read(path: str) -> dict:
    try:
        document = Fields(f"plan={path}", "", read_json(path, "plan"))
        document.text("model")
        if document.values.get("train") is not None:
            document.object("train")
    except ValueError as error:
        raise ValueError(f"{error} Type the plan.json that plan.py wrote, or run plan.py again.") from None
    return dict(document.values)
