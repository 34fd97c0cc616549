"""The planner for homogeneous pods: data x tensor x pipeline plans of the models that train.py trains."""

from mstrain.planning.pod.config import PodConfig
from mstrain.planning.pod.plan import PodPlan
from mstrain.planning.pod.search import PodResult, search_pod
from mstrain.planning.pod.target import Pod, find_pod

__all__ = ["Pod", "PodConfig", "PodPlan", "PodResult", "find_pod", "search_pod"]
