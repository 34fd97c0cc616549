"""Which plans train.py can run, and their keys of train.py."""

import shlex
from collections.abc import Mapping

from mstrain.models.remat import LADDER
from mstrain.models.sharding import SHARD
from mstrain.planner.plan import PodPlan
from mstrain.planner.remat import NAMES, parse_remat


def why_not_trainable(plan: PodPlan, slices: int = 1) -> str:
    """The reason why train.py cannot run a plan on `slices` TPU slices; empty if it can."""
    if plan.data % slices:
        return f"train.py needs whole replicas on each of the {slices} TPU slices, and this plan has stages across them"
    if plan.shard not in SHARD:
        return f"train.py does not support shard={plan.shard}, only {', '.join(SHARD)}"
    if plan.remat not in LADDER and not parse_remat(plan.remat).saved <= set(NAMES):
        return f"train.py does not support remat={plan.remat}: it saves values without a name in train.py"
    return ""


def train_keys(plan: PodPlan, slices: int = 1) -> dict[str, str | int]:
    """The keys of train.py that `plan=FILE` sets, for a plan on `slices` TPU slices."""
    remat = parse_remat(plan.remat)
    kept, moved = (
        "+".join(name for part, name in NAMES.items() if part in parts)
        for parts in (remat.saved - remat.offloaded - {"input"}, remat.offloaded)
    )
    schedule: dict[str, str | int] = {"pipeline.schedule": plan.schedule} if plan.pipeline > 1 else {}
    if plan.chunks > 1:
        schedule["pipeline.interleave"] = plan.chunks
    return {
        "mesh": str(plan.mesh(slices)), "parallel": plan.algorithm, "accumulate": plan.microbatches,
        "remat": plan.remat if plan.remat in LADDER else kept or "full", "shard": plan.shard,
        **({"offload": moved} if moved else {}), **schedule,
    }  # fmt: skip


def spelled(keys: Mapping[str, object]) -> str:
    """The keys as `KEY=VALUE ...`, quoted for a shell."""
    return " ".join(f"{key}={shlex.quote(str(value))}" for key, value in keys.items())
