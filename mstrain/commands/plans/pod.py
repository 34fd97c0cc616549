"""Plans for homogeneous pods: search, tables, the simulated winner, and the train.py line."""

import sys

from mstrain.commands.plans.output import console, make_folder
from mstrain.planner.calibrated import calibrated_pod
from mstrain.planner.config import PodConfig
from mstrain.planner.report import memory_table, plans_table, plot_plans, stages_table, terms_table, write_tables
from mstrain.planner.search import search_pod
from mstrain.planner.simulated import simulate_plan
from mstrain.planner.target import find_pod
from mstrain.planner.trainer import closing_lines, write_plan

__all__ = ["PodConfig", "run_pod"]


def run_pod(config: PodConfig) -> int:
    """Searches, prints, writes; the last line is the train.py command of the best plan it can run."""
    pod = calibrated_pod(find_pod(config.cluster, config.dtype), config.calibration, config.dtype)
    folder, say = make_folder(config.run_dir), console()
    request = config.request(pod)
    result = search_pod(request, config.max_seconds, lambda line: print(f"plan: {line}", file=sys.stderr))
    write_tables(request, result, folder, config.top_k)
    path = write_plan(request, result, folder)
    plot_plans(request, result.ranked, folder / "throughput_against_memory.png")
    say.print(plans_table(request, result, config.top_k))
    scope = "the whole space" if result.finished else f"part of the space (max_seconds={config.max_seconds:g} ended it)"
    say.print(
        f"{result.costed} plans of {scope} costed in {result.seconds:.1f} s, {len(result.rejected)} layouts "
        f"do not fit; links: {result.best.constants}"
    )
    say.print(terms_table(result, config.top_k))
    if result.best.plan.pipeline > 1:
        say.print(stages_table(result.best))
    say.print(memory_table(result.best))
    written = ["plans.csv", "stages.csv", "plans.json", "throughput_against_memory.png"]
    if config.simulate:
        simulated = simulate_plan(request, result.best, config.simulated_microbatches)
        written += simulated.write(folder)
        say.print(*simulated.summary(result.best.plan.microbatches), sep="\n")
    say.print(f"{', '.join(written)} in {folder}")
    for line in closing_lines(request, result, path):
        say.print(line)
    return 0
