"""Golden numbers of the original DistIR and the plans they belong to."""

import dataclasses
import json
from pathlib import Path

import pytest

from mstrain.simulator.cluster import GIGABIT, Cluster, Device, Switch
from mstrain.simulator.placement import Degrees, Placement
from research.distir.mlp import Mlp, StepOptions
from research.distir.rules import RULES
from research.distir.transform_mlp import mlp_step

ELEMENT_BYTES = {"fp16": 2, "fp32": 4}
ROOT = {"notebook": Device(1e14, 1.2e12), "head": Device(1.4e13, 9e11)}


@pytest.fixture(scope="session")
def distir(request) -> dict:
    return json.loads((Path(request.config.getoption("--golden")) / "distir.json").read_text())


@pytest.fixture(scope="session")
def golden_plan():
    return plan_of_case


def plan_of_case(case: dict):
    """(step, placement, cluster, rules, batch) of one golden case of a perceptron."""
    given, rules = case["inputs"], RULES[case["rules"]]
    fit = {int(size): tuple(values) for size, values in given.get("allreduce_parameters", {}).items()}
    rules = dataclasses.replace(rules, allreduce_fit=fit)
    degrees = Degrees(given["dp"], given["hp"], given["pp"], given["microbatches"])
    mlp = Mlp(
        given["layers"],
        given["input_dim"],
        given["hidden_dim"],
        given["output_dim"],
        given["batch"],
        ELEMENT_BYTES[given.get("dtype", "fp32")],
    )
    options = StepOptions(
        optimizer=given.get("optimizer", False),
        loaded=given.get("filtered", True),
        gather_outputs=not given.get("skip_allgathers", True),
    )
    # Device 0 keeps the default hardware; untransformed programs run on it.
    worker = Device(given["device_flops"], given["dram_bytes_per_s"])
    cluster = Cluster(
        (ROOT[case["rules"]],) + (worker,) * degrees.world, Switch(given["bandwidth_gbps"] * GIGABIT)
    )
    placement = Placement(degrees, rules.axis_order, 1 if given["transformed"] else 0)
    return mlp_step(mlp, degrees, rules, options), placement, cluster, rules, mlp.batch
