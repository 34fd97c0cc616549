"""Finds the index of this process in its job.

Sources, in this order: the keys coordinator=, processes= and process=; the variables
JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID (launch/jobset.yaml sets them); what JAX detects
in a TPU pod, SLURM or Kubernetes. Without any of them, a run has one process.
"""

import dataclasses
import os

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


@dataclasses.dataclass(frozen=True)
class ProcessInfo:
    """Process `process` of `processes`, which join at `coordinator` (HOST:PORT of process 0)."""

    coordinator: str
    processes: int
    process: int

    def __post_init__(self):
        host, colon, port = self.coordinator.rpartition(":")
        if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
            raise ValueError(
                f"coordinator={self.coordinator!r} is not an address. Type coordinator=HOST:PORT of process 0."
            )
        if not 0 <= self.process < self.processes:
            raise ValueError(
                f"process={self.process} of processes={self.processes}: processes count from 0. "
                f"Type process=0 to process={max(self.processes - 1, 0)}, a different one for each."
            )

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)


def find_process(
    coordinator: str | None, processes: int | None, process: int | None
) -> tuple[ProcessInfo | None, list[int] | None]:
    """This process, None in a run of one process; and the indices of the devices it may use, None for all."""
    given = {"coordinator": coordinator, "processes": processes, "process": process}
    if coordinator is not None and processes is not None and process is not None:
        return ProcessInfo(coordinator, processes, process), None
    if any(value is not None for value in given.values()):
        lacking = ", ".join(f"{name}=" for name, value in given.items() if value is None)
        raise ValueError(
            f"coordinator=, processes= and process= must be given together. Type {lacking} too "
            "(such as coordinator=10.0.0.1:8476 processes=2 process=0)."
        )
    values = [os.environ.get(name, "") for name in VARIABLES]
    if all(values):
        try:
            return ProcessInfo(values[0], int(values[1]), int(values[2])), None
        except ValueError as error:
            found = dict(zip(VARIABLES, values, strict=True))
            raise ValueError(f"The environment has {found}: {error}") from None
    from jax._src.clusters import ClusterEnv  # as in jax.distributed.initialize()

    found = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, 60)
    coordinator, processes, process, devices = found
    if coordinator is None or processes is None or process is None or processes < 2:
        return None, None
    # One task per SLURM node has the node's devices; JAX's rule of one device per task is for several.
    alone_on_node = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "").partition("(")[0] == "1"
    info = ProcessInfo(coordinator, processes, process)
    return info, None if alone_on_node or devices is None else list(devices)
