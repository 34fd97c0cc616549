"""Kill and resume between any two of nine plans.

`python -m tests.training.resume_matrix [OPTIMIZER [PLAN ...]]` trains each plan, or those named, without interruption
and saves a checkpoint on the way. Then every plan resumes from every checkpoint, and the losses and gradient norms of
its next steps are compared with those of the run that saved: the same bits on the same plan, a relative difference of
at most 1e-5 on another. Prints the worst resume from each checkpoint and exits with 1 if one is worse than that.
OPTIMIZER is adamw (default), muon or adafactor. A PLAN called `experts` stands for five plans of a model with experts.
"""

import dataclasses
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

from mstrain.checkpoints.checkpoints import Checkpoints
from mstrain.data import Batch
from mstrain.mesh import emulate_devices
from mstrain.models.config import ModelConfig
from mstrain.models.plan import ParallelConfig
from mstrain.models.stages import PipelineConfig
from mstrain.program.optimizer import OptimizerConfig, make_optimizer, schedule_of
from mstrain.program.step import init_state, step_program
from tests.quick import QUICK
from tests.training.cases import Case
from tests.training.families import SEQ, VOCABULARY
from tests.training.parity import SEQUENCES, STEPS, batches, module_of

MODEL = ModelConfig("resumed", layers=4, width=32, heads=4, mlp_dim=64, vocab_size=VOCABULARY, context=SEQ)
PLANS = {
    "row x col, slices": Case("2x4", ParallelConfig(slices="2"), model=MODEL),
    "col x row, mixed, accumulate, remat": Case("4x2", ParallelConfig("wang", mlp="fsdp"), 2, "dots", model=MODEL),
    "shard=parameters": Case("2x2x2", ParallelConfig("collective"), shard="parameters", model=MODEL),
    "1f1b": Case("stage2-row2-col2", ParallelConfig(), 4, pipeline=PipelineConfig("1f1b"), model=MODEL),
    "interleaved": Case(
        "data2-stage2-col2", ParallelConfig("megatron"), 2, pipeline=PipelineConfig("interleaved"), model=MODEL
    ),
    "zero-bubble": Case(
        "stage2-row2-col2", ParallelConfig(slices="2"), 4, "dots", pipeline=PipelineConfig("zero-bubble"), model=MODEL
    ),
    "context, ring": Case("context2-row2-col2", ParallelConfig("fsdp", context="ring"), model=MODEL),
    "replica": Case("replica2-data2-col2", ParallelConfig("collective"), shard="optimizer", model=MODEL),
    "Megatron, remat": Case("1x4", ParallelConfig("megatron"), 2, "full", model=MODEL),
}
EXPERTS = dataclasses.replace(
    MODEL, name="experts", layers=2, heads=8, bias="none", tied=False, position="rotary", experts=4
)
EXPERT_PLANS = {
    "experts over expert": Case("expert4-row1-col2", ParallelConfig("collective", expert_slices="2"), model=EXPERTS),
    "over expert, ZeRO 3": Case("data2-expert2-row2-col1", ParallelConfig(), shard="parameters", model=EXPERTS),
    "over expert, slices": Case("expert2-row2-col2", ParallelConfig(slices="2"), 2, "full", model=EXPERTS),
    "over expert, stages": Case(
        "stage2-expert2-row1-col2", ParallelConfig("megatron"), 2, pipeline=PipelineConfig(), model=EXPERTS
    ),
    "row x col of experts": Case("2x4", ParallelConfig("wang"), model=EXPERTS),
}
SAVED, LAST = 3, 5  # steps
TOLERANCE = 1e-5


class Plan:
    """A plan with its compiled step."""

    def __init__(self, case: Case, config: OptimizerConfig):
        self.case, self.module, self.optimizer = case, module_of(case), make_optimizer(config)
        self.schedule = schedule_of(config, STEPS)
        self.step = step_program(self.module, self.optimizer, SEQUENCES, case.accumulate).compile(QUICK)

    def advance(self, state, begin: int, end: int):
        """(state, loss and gradient norm of each step [end - begin, 2])."""
        curve = []
        for k in range(begin, end):
            tokens = batches()[k].reshape(self.case.accumulate, -1, SEQ + 1)
            sharding = self.step.input_shardings[0][1]
            state, metrics = self.step(state, jax.device_put(Batch(tokens), sharding), self.schedule)
            curve.append([float(metrics["loss"]), float(metrics["grad_norm"])])
        return state, np.array(curve)


def whole_run(plan: Plan, directory: Path) -> np.ndarray:
    """The curve from step SAVED to LAST of a run that is not interrupted and saves a checkpoint in `directory`."""
    state, _ = plan.advance(init_state(plan.module, plan.optimizer, 0), 0, SAVED)
    checkpoints = Checkpoints(directory, 1)
    checkpoints.save(SAVED, state, plan.module, plan.optimizer, {})
    checkpoints.wait()
    checkpoints.close()
    return plan.advance(state, SAVED, LAST)[1]


def resumed(plan: Plan, directory: Path) -> np.ndarray:
    """The same steps of `plan` from the checkpoint in `directory`."""
    checkpoints = Checkpoints(directory, None)
    state = checkpoints.restore(SAVED, plan.module, plan.optimizer)
    checkpoints.close()
    return plan.advance(state, SAVED, LAST)[1]


def main() -> int:
    config = OptimizerConfig(*sys.argv[1:2], learning_rate=3e-3, warmup=5)
    root, plans, curves = Path(tempfile.mkdtemp()), {}, {}
    every = PLANS | EXPERT_PLANS
    for name in EXPERT_PLANS if sys.argv[2:] == ["experts"] else sys.argv[2:] or PLANS:
        plans[name] = Plan(dataclasses.replace(every[name], optimizer=config), config)
        curves[name] = whole_run(plans[name], root / name)
        print(f"compiled and saved: {name}", file=sys.stderr, flush=True)
    print("| saved by | same plan | worst of the others | loss | gradient norm |\n|" + " --- |" * 5)
    failed = 0
    for saved, expected in curves.items():
        found = {name: resumed(plan, root / saved) for name, plan in plans.items()}
        same = bool(np.array_equal(found.pop(saved), expected))
        errors = {name: np.max(np.abs(curve / expected - 1), axis=0) for name, curve in found.items()}
        worst = max(errors, key=lambda name: max(errors[name]))
        loss, grad_norm = errors[worst]
        print(
            f"| {saved} | {'same bits' if same else 'DIFFERS'} | {worst} | {loss:.1e} | {grad_norm:.1e} |", flush=True
        )
        failed += (not same) + sum(max(error) > TOLERANCE for error in errors.values())
    print(f"{failed} of {len(plans) ** 2} resumes are wrong")
    return int(failed > 0)


if __name__ == "__main__":
    emulate_devices(8)
    jax.config.update("jax_default_matmul_precision", "highest")
    sys.exit(main())
