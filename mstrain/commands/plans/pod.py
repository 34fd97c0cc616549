"""Plans for homogeneous pods: search, tables, the simulated winner, and the train.py line."""

import sys

from mstrain.commands.plans.output import console, make_folder, no_time_to_simulate
from mstrain.hardware.clusters import find_pod
from mstrain.planner.clock import SEARCH_PART, Clock, OutOfTime
from mstrain.planner.config import PodConfig
from mstrain.planner.plan_file import closing_lines, write_plan
from mstrain.planner.report import memory_table, plans_table, plot_plans, stages_table, terms_table, write_tables
from mstrain.planner.search import search_pod
from mstrain.planner.simulated import simulate_plan

__all__ = ["PodConfig", "run_pod"]


def run_pod(config: PodConfig) -> int:
    """Searches, prints, writes; the last line is the train.py command of the best plan it can run."""
    pod = find_pod(config.cluster, config.dtype).calibrated(config.calibration, config.dtype)
    folder, say = make_folder(config.run_dir), console()
    request = config.request(pod)
    clock = Clock((SEARCH_PART if config.simulate else 1) * config.max_seconds)
    result = search_pod(request, clock, lambda line: print(f"plan: {line}", file=sys.stderr))
    write_tables(request, result, folder, config.top_k)
    path = write_plan(request, result, folder)
    plot_plans(request, result.ranked, folder / "throughput_against_memory.png")
    say.print(plans_table(request, result, config.top_k))
    say.print(f"{result.summary} {len(result.rejected)} layouts do not fit; links: {result.best.step.constants.source}")
    say.print(terms_table(result, config.top_k))
    if result.best.plan.pipeline > 1:
        say.print(stages_table(result))
    say.print(memory_table(result))
    written = ["plans.csv", "stages.csv", "plans.json", "throughput_against_memory.png"]
    if config.simulate:
        clock.budget = config.max_seconds
        try:
            simulated = simulate_plan(request, result.best, config.simulated_microbatches, clock)
            written += simulated.write(folder)
            say.print(*simulated.summary(result.best.plan.microbatches), sep="\n")
        except OutOfTime:
            say.print(no_time_to_simulate(config.max_seconds))
    say.print(f"{', '.join(written)} in {folder}")
    for line in closing_lines(request, result, path):
        say.print(line)
    return 0
