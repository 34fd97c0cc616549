"""Which plans train.py runs, and the keys that run them."""

from mstrain.models.transformer import REMAT
from mstrain.planner.plan import PodPlan


def why_not_trainable(plan: PodPlan) -> str:
    """Why train.py cannot run a plan today; empty where it can."""
    if plan.pipeline > 1:
        return f"train.py has no pipeline, this plan has {plan.pipeline} stages"
    if plan.context > 1:
        return f"train.py keeps sequences whole on a row, this plan splits them over {plan.context} devices"
    if plan.shard != "none":
        return f"train.py keeps the whole state in every data-parallel copy, this plan has shard={plan.shard}"
    if plan.remat not in REMAT:
        return f"train.py has no remat={plan.remat}, only {', '.join(REMAT)}"
    return ""


def train_keys(plan: PodPlan) -> dict[str, str | int]:
    """The keys of train.py that `plan=FILE` supplies."""
    return {"mesh": plan.mesh, "parallel": plan.algorithm, "accumulate": plan.microbatches, "remat": plan.remat}
