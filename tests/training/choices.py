"""Whether gradient norms of models with experts differ in single steps because tokens change their experts.

`python -m tests.training.choices [FAMILY]` makes twenty steps on one device, then from weights that differ by one part
in ten million, and on two meshes. For every step it prints the relative difference of the gradient norm and how many
choices of an expert differ, from the loads of all experts.
"""

import functools
import sys

import jax
import numpy as np

from mstrain.data import Batch
from mstrain.mesh import emulate_devices
from mstrain.models.plan import ParallelConfig
from mstrain.program.optimizer import make_optimizer, schedule_of
from mstrain.program.step import init_state, step_program
from tests.quick import QUICK
from tests.training.cases import OPTIMIZER, Case
from tests.training.families import FAMILIES
from tests.training.flips import nudged
from tests.training.parity import SEQ, SEQUENCES, STEPS, batches, module_of


@functools.cache
def step_of(case: Case):
    return step_program(module_of(case), make_optimizer(OPTIMIZER), SEQUENCES).compile(QUICK)


def run(case: Case, change=lambda params: params) -> tuple[np.ndarray, np.ndarray]:
    """(gradient norms [STEPS], choices of every expert [STEPS, E], summed over tokens and layers)."""
    step, model = step_of(case), case.model
    state, shardings = init_state(module_of(case), make_optimizer(OPTIMIZER), 0), step.input_shardings[0]
    state = {**state, "params": jax.tree.map(jax.device_put, change(state["params"]), shardings[0]["params"])}
    norms, loads = [], []
    for k in range(STEPS):
        batch = jax.device_put(Batch(batches()[k].reshape(1, -1, SEQ + 1)), shardings[1])
        state, metrics = step(state, batch, schedule_of(OPTIMIZER, STEPS))
        norms.append(float(metrics["grad_norm"]))
        loads.append(np.asarray(metrics["expert_load"]))
    layers = model.layers - model.dense_layers
    choices = np.array(loads) * SEQUENCES * SEQ * model.experts_per_token * layers / model.experts
    return np.array(norms), np.rint(choices)


def main(names: list[str]) -> None:
    emulate_devices(8)
    jax.config.update("jax_default_matmul_precision", "highest")
    model = FAMILIES[names[0] if names else "gpt_oss"]
    one, mesh = Case("1x1", ParallelConfig("gspmd"), model=model), Case("2x4", ParallelConfig(slices="2"), model=model)
    other = Case("expert2-row2-col2", ParallelConfig("collective"), model=model)
    norms, choices = run(one)
    print("| | step: difference of the gradient norm, choices that differ |\n| --- | --- |")
    for name, case in {"one device, nudged": (one, nudged), "2x4": (mesh,), "expert2-row2-col2": (other,)}.items():
        found, chosen = run(*case)
        steps = (
            f"{k + 1}: {abs(found[k] / norms[k] - 1):.1e}, {np.abs(chosen[k] - choices[k]).sum() / 2:.0f}"
            for k in range(STEPS)
        )
        print(f"| {name} | {'; '.join(steps)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
