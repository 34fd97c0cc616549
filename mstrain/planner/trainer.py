"""Which plans train.py runs, and the keys that run them."""

from mstrain.models.sharding import SHARD
from mstrain.models.transformer import REMAT
from mstrain.planner.plan import PodPlan


def why_not_trainable(plan: PodPlan) -> str:
    """Why train.py cannot run a plan today; empty where it can."""
    if plan.pipeline > 1:
        return f"train.py has no pipeline, this plan has {plan.pipeline} stages"
    if plan.context > 1:
        return f"train.py keeps sequences whole on a row, this plan splits them over {plan.context} devices"
    if plan.shard not in SHARD:
        return f"train.py has no shard={plan.shard}, only {', '.join(SHARD)}"
    if plan.remat not in REMAT:
        return f"train.py has no remat={plan.remat}, only {', '.join(REMAT)}"
    return ""


def train_keys(plan: PodPlan) -> dict[str, str | int]:
    """The keys of train.py that `plan=FILE` supplies."""
    keys = {"mesh": plan.mesh, "parallel": plan.algorithm, "accumulate": plan.microbatches, "remat": plan.remat}
    return {**keys, "shard": plan.shard}
