"""Compiled steps of Mixtral 8x7B on 256 chips, compared with the planner and with the figures that MaxText published.

    python -m tests.docs.expert_steps                                  prints the table of docs/howto/experts.md
    python -m tests.docs.expert_steps target=v5p-512 meshes=16x16 algorithms=fsdp remat=full [KEY=VALUE ...]

The second form compiles a step with 8 sequences of 4096 tokens per chip, writes its row of docs/data/expert_steps.csv
and prints the table.
"""

import sys

from mstrain.benchmarks.config import load
from mstrain.hardware.clusters import find_pod
from mstrain.mesh import parse_mesh
from mstrain.models.parallel import ParallelConfig
from mstrain.models.zoo import load_preset
from mstrain.planner.cost import Costed, cost_step
from mstrain.planner.plan import PodPlan
from mstrain.planner.request import PlanRequest
from tests.docs.compile_step import compile_steps
from tests.docs.rows import read_rows, replace_rows
from tests.docs.steps import ROOT
from tests.planner.mixtral import CHIPS, PUBLISHED, SEQ

FILE = ROOT / "docs" / "data" / "expert_steps.csv"
HEAD = "| target | plan | compiled, s (low to high), memory | planner / compiled | tokens/s per chip | over published |"
MODEL, BATCH = "mixtral_8x7b", 8 * CHIPS
KEY = ("target", "mesh", "algorithm", "shard", "accumulate", "remat")
COLUMNS = (*KEY, "ms", "low_ms", "high_ms", "products_ms", "kernels_ms", "copies_ms", "other_ms", "exposed_ms",
           "memory_gib", "fits", "libtpu")  # fmt: skip


def read() -> list[dict[str, str]]:
    """Rows by target, in order of time."""
    return sorted(read_rows(FILE), key=lambda row: (row["target"], float(row["ms"])))


def cost_of(row: dict[str, str]) -> Costed:
    """The planner's cost of the step of a row."""
    parallel = ParallelConfig(row["algorithm"])
    request = PlanRequest(load_preset(MODEL), find_pod(row["target"]), (parallel,), BATCH, SEQ)
    plan = PodPlan.on(parse_mesh(row["mesh"]), parallel, int(row["accumulate"]), row["remat"], row["shard"])
    costed = cost_step(request, plan)
    assert costed is not None, "a step that was compiled is legal"
    return costed


def planned(row: dict[str, str]) -> float:
    """The planner's milliseconds of the step of a row, without stragglers."""
    return 1e3 * cost_of(row).scheduled_seconds


def table() -> str:
    lines = [HEAD, "|" + " --- |" * 6]
    for row in read():
        rate, shard = 1e3 * BATCH * SEQ / CHIPS / float(row["ms"]), row["shard"]
        keys = [f"mesh={row['mesh']} parallel={row['algorithm']}", f"shard={shard}" * (shard != "none")]
        keys += [f"accumulate={row['accumulate']}" * (row["accumulate"] != "1"), f"remat={row['remat']}"]
        low, high = (float(row[f"{end}_ms"]) / 1e3 for end in ("low", "high"))
        compiled = f"{float(row['ms']) / 1e3:.2f} s ({low:.2f} to {high:.2f}), {row['memory_gib']} GiB"
        ratio, over = planned(row) / float(row["ms"]), 100 * (rate / PUBLISHED[row["target"]][1] - 1)
        plan = " ".join(filter(None, keys))
        lines.append(f"| {row['target']} | `{plan}` | {compiled} | {ratio:.2f} | {rate:,.0f} | {over:+.0f} % |")
    return "\n".join(lines)


if __name__ == "__main__":
    if keys := sys.argv[1:]:
        config = load([f"models={MODEL}", f"batch={BATCH}", f"seq={SEQ}", *keys])
        for step in compile_steps(config):
            row = {**step.row, "accumulate": str(config.accumulate)}
            replace_rows(FILE, COLUMNS, KEY, [row], near=KEY[:1])
    print(table())
