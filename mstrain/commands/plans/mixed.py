"""plan.py planner=optimal: the optimal plan of a mixed cluster, which files in the formats of Metis describe."""

from dataclasses import dataclass

from mstrain.commands.plans.output import console, make_folder, no_time_to_simulate, progress
from mstrain.hardware.hosts import read_hosts
from mstrain.hardware.layer_profiles import read_profiles
from mstrain.planner.clock import SEARCH_PART, Clock, OutOfTime
from mstrain.planner.mixed.options import PlanOptions
from mstrain.planner.mixed.report import plans_table, simulated_table, stages_table
from mstrain.planner.mixed.result import write_result, write_stages
from mstrain.planner.mixed.search import plan_optimal
from mstrain.planner.mixed.simulated import simulate_mixed
from mstrain.planner.mixed.times import filled_in

NOT_TRAINABLE = (
    "train.py cannot run these plans: its stages have equal devices, and these plans have stages of unequal devices. "
    "To plan for hosts of one kind, type planner=pod cluster=CHIP:N."
)


@dataclass(frozen=True, kw_only=True)
class Files:
    """The files that describe a mixed cluster."""

    hostfile: str
    """File with one line `ADDRESS slots=K` per host; K is the number of devices of the host."""
    clusterfile: str
    """JSON file that maps each ADDRESS to instance_type (device type), inter_bandwidth and intra_bandwidth
    (GB/s between hosts and within one) and memory (GB per device)."""
    profiles: str
    """Folder of measured profiles of the model, one file DeviceType.<TYPE>_tp<T>_bs<S>.json for each device
    type, tensor-parallel degree T and batch of S samples."""
    run_dir: str = "runs/plan"
    """Folder in which tables, and the trace and pictures of a simulation, are written."""

    @property
    def paths(self) -> tuple[str, str, str]:
        return self.hostfile, self.clusterfile, self.profiles


@dataclass(frozen=True, kw_only=True)
class OptimalConfig(PlanOptions, Files):
    """The optimal plan of a mixed cluster."""


def run_optimal(config: OptimalConfig) -> int:
    """Prints the best plans with the terms of their cost and the certificate, simulates the best plan, writes files."""
    folder, say = make_folder(config.run_dir), console()
    clock = Clock((SEARCH_PART if config.simulate else 1) * config.max_seconds)
    with progress("planner=optimal", clock):
        result = plan_optimal(*config.paths, config, clock)
    write_result(result, folder / "optimal.json")
    write_stages(result, folder / "optimal.csv")
    hosts = read_hosts(config.hostfile, config.clusterfile)
    for line in filter(None, (hosts.repeated, *filled_in(read_profiles(config.profiles)))):
        say.print(line)
    say.print(plans_table(result))
    say.print(stages_table(result.best))
    proof = result.certificate
    reason = "proven optimal in the space of plans" if proof.proven else "not proven optimal"
    say.print(f"{proof.summary} Lower bound {proof.lower_bound_ms:.3f} ms, gap {100 * result.gap:.2f} %: {reason}.")
    written = ["optimal.json", "optimal.csv"]
    if config.simulate:
        clock.budget = config.max_seconds
        try:
            simulated = simulate_mixed(result.best, config, hosts, clock)
            say.print(simulated_table(simulated.stages))
            say.print(*simulated.summary(result.best.microbatches), sep="\n")
            written += simulated.write(folder)
        except OutOfTime:
            say.print(no_time_to_simulate(config.max_seconds))
    say.print(NOT_TRAINABLE)
    say.print(f"{', '.join(written)} in {folder}")
    return 0
