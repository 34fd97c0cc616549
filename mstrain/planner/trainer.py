"""Which plans train.py can run, and the keys for them."""

import shlex
from collections.abc import Mapping

from mstrain.models.remat import LADDER
from mstrain.models.sharding import SHARD
from mstrain.planner.plan import PodPlan
from mstrain.planner.remat import NAMES, parse_remat


def why_not_trainable(plan: PodPlan, slices: int = 1) -> str:
    """Why train.py cannot run a plan over so many TPU slices; empty where it can."""
    if plan.data % slices:
        return f"train.py has copies of the model on each of the {slices} TPU slices, this plan has stages across them"
    if plan.shard not in SHARD:
        return f"train.py has no shard={plan.shard}, only {', '.join(SHARD)}"
    if plan.remat not in LADDER and not parse_remat(plan.remat).saved <= set(NAMES):
        return f"train.py has no remat={plan.remat}: it names no element-wise values"
    return ""


def train_keys(plan: PodPlan, slices: int = 1) -> dict[str, str | int]:
    """The keys of train.py that `plan=FILE` supplies, for a plan over so many TPU slices."""
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
    """`KEY=VALUE ...`, quoted for a shell."""
    return " ".join(f"{key}={shlex.quote(str(value))}" for key, value in keys.items())
