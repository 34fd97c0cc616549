"""The optimal planner: complete plans only, exact over a stated space, with a certificate."""

from mstrain.planner.mixed.options import PlanOptions
from mstrain.planner.mixed.result import OptimalResult, Plan, StagePlan, write_result, write_stages
from mstrain.planner.mixed.search import plan_optimal

__all__ = ["OptimalResult", "Plan", "PlanOptions", "StagePlan", "plan_optimal", "write_result", "write_stages"]
