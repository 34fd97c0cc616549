"""The optimal planner: complete plans only, exact over a stated space, with a certificate."""

from mstrain.planning.optimal.options import PlanOptions
from mstrain.planning.optimal.result import OptimalResult, Plan, StagePlan, write_csv, write_json
from mstrain.planning.optimal.search import plan_optimal

__all__ = ["OptimalResult", "Plan", "PlanOptions", "StagePlan", "plan_optimal", "write_csv", "write_json"]
