"""A job of several processes: find this one's place, join, agree, and end together.

The place comes from, in this order: the keys coordinator=, processes= and process=; the variables
JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID (launch/jobset.yaml sets them); what JAX detects
of a TPU pod, SLURM or Kubernetes. Without any of them a run has one process. Whoever is missing is named,
within `hosts.join_seconds` at the start, at once when a process dies, and within `hosts.barrier_seconds` at a
barrier.
"""

import contextlib
import dataclasses
import functools
import math
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable

import jax

from mstrain.job import relay, rendezvous
from mstrain.job.ending import end
from mstrain.job.exit_codes import CONFIGURATION, RESTART, code_of
from mstrain.job.rendezvous import Link, ProcessInfo
from mstrain.mesh import attached

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


@dataclasses.dataclass(frozen=True)
class HostsConfig:
    """Seconds within which all processes must have come (`join_seconds`), after which a host that says
    nothing counts as dead (`silent_seconds`), and that a process waits at a barrier (`barrier_seconds`)."""

    join_seconds: float = 300.0
    silent_seconds: float = 60.0
    barrier_seconds: float = 600.0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if not 1 <= getattr(self, field.name) < math.inf:
                raise ValueError(
                    f"hosts.{field.name}={getattr(self, field.name)} is no time. Type hosts.{field.name}=60."
                )


def find_process(
    coordinator: str | None, processes: int | None, process: int | None
) -> tuple[ProcessInfo | None, list[int] | None]:
    """This process's place, None in a run of one; the indices of the devices it may use, None for all."""
    given = (coordinator, processes, process)
    names = ("coordinator", "processes", "process")
    if given != (None, None, None):
        if None in given:
            lacking = ", ".join(f"{name}=" for name, value in zip(names, given, strict=True) if value is None)
            raise ValueError(
                f"coordinator=, processes= and process= belong together. Type {lacking} too "
                "(such as coordinator=10.0.0.1:8476 processes=2 process=0)."
            )
        return ProcessInfo(coordinator, processes, process), None
    values = [os.environ.get(name) for name in VARIABLES]
    if all(values):
        try:
            return ProcessInfo(values[0], int(values[1]), int(values[2])), None
        except ValueError as error:
            found = dict(zip(VARIABLES, values, strict=True))
            raise ValueError(f"The environment says {found}: {error}") from None
    from jax._src.clusters import ClusterEnv  # what jax.distributed.initialize() itself asks

    *found, devices = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, 60)
    if None in found or found[1] < 2:
        return None, None
    # One task per SLURM node has the node's devices; JAX's rule of one device per task is for several.
    alone_on_node = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "").partition("(")[0] == "1"
    return ProcessInfo(*found), None if alone_on_node else devices


class Job:
    """The processes of a run. A run of one has no links, and every question is answered at once."""

    def __init__(self, seat: ProcessInfo | None, config: HostsConfig, names: dict[int, str], links: dict[int, Link]):
        self.process, self.processes = (seat.process, seat.processes) if seat else (0, 1)
        self.config, self.names, self._links = config, names, links
        self._left: set[int] = set()
        self._handlers: dict[str, Callable[[int, dict], None]] = {"bye": self._bye, "gone": self._told}
        self._used: dict[str, int] = {}
        self._unheard: list[tuple[int, dict]] = []
        self._hearing = threading.RLock()
        if links:
            rendezvous.watch(links, self._heard, self._gone)

    @property
    def leads(self) -> bool:
        """Whether this process creates files and prints."""
        return self.process == 0

    def on(self, kind: str, handler: Callable[[int, dict], None]) -> None:
        """Calls `handler(process, message)` for messages of this kind, from a thread of its own."""
        with self._hearing:
            self._handlers[kind] = handler
            early = [(process, message) for process, message in self._unheard if message.get("kind") == kind]
            for process, message in early:
                handler(process, message)

    def send(self, kind: str, **values) -> None:
        """Process 0 sends to all others, the others to process 0; a run of one sends nothing."""
        for link in self._links.values():
            link.send({"kind": kind, **values})

    def gather(self, name: str, value: str) -> list[str]:
        """What every process gave for `name`; raises ValueError naming who did not come here in time."""
        if self.processes == 1:
            return [value]
        from jax._src.distributed import global_state

        client = global_state.client
        self._used[name] = self._used.get(name, 0) + 1  # keys of the service are never reused
        key = f"mstrain/{name}/{self._used[name]}"
        client.key_value_set(f"{key}/{self.process}", value)
        try:
            client.wait_at_barrier(key, int(self.config.barrier_seconds * 1000))
        except jax.errors.JaxRuntimeError as error:
            came = {int(path.rpartition("/")[2]) for path, _ in client.key_value_dir_get(key)}
            missing = ", ".join(self.name(p) for p in range(self.processes) if p not in came)
            raise ValueError(
                f"Barrier {name!r}: {missing or 'some process'} did not come within "
                f"{self.config.barrier_seconds:.0f} s. "
                "Look at its output; type hosts.barrier_seconds= above the time it needs."
            ) from error
        values = [client.key_value_try_get(f"{key}/{process}") for process in range(self.processes)]
        if self._used[name] > 1:  # all have read what was gathered last time, or they would not be here
            client.key_value_delete(f"mstrain/{name}/{self._used[name] - 1}/{self.process}")
        return values

    def barrier(self, name: str) -> None:
        """Returns when every process is here; after `hosts.barrier_seconds`, ValueError names the missing."""
        self.gather(name, "here")

    def agree(self, what: str, value: str) -> None:
        """Raises ValueError, naming the processes, unless every process gives the same value."""
        values = self.gather(f"agree on {what}", value)
        others = [self.name(process) for process, other in enumerate(values) if other != values[0]]
        if others:
            raise ValueError(
                f"{', '.join(others)}: another {what} than process 0. Start every process with the same."
            )

    def name(self, process: int) -> str:
        """`process 1 (host)`."""
        return f"process {process} ({self.names[process]})" if process in self.names else f"process {process}"

    def say(self, text: str) -> None:
        """A line of this process, whichever it is; none when the output's disk is full."""
        with contextlib.suppress(OSError):
            print(f"process {self.process} of {self.processes}: {text}", flush=True)

    def leave(self, reason: str | None = None, code: int = 0) -> None:
        """Says farewell; with a reason, the others end with the same exit code."""
        self.send("bye", reason=reason and reason[:2000], code=code)

    def _heard(self, process: int, message: dict) -> None:
        with self._hearing:
            handler = self._handlers.get(str(message.get("kind")))
            if handler:
                handler(process, message)
            else:  # another process is ahead of this one
                self._unheard.append((process, message))

    def _bye(self, process: int, message: dict) -> None:
        self._left.add(process)
        if message.get("reason"):
            self._end(f"{self.name(process)} ended: {message['reason']}", int(message.get("code") or RESTART))

    def _told(self, _: int, message: dict) -> None:
        self._end(str(message["reason"]), int(message["code"]))

    def _gone(self, process: int) -> None:
        if process not in self._left:
            self._end(
                f"{self.name(process)} is gone without a word: killed, crashed, or its host is lost. Ending; "
                "the same command, on all hosts, goes on from the newest checkpoint.",
                RESTART,
            )

    def _end(self, reason: str, code: int) -> None:
        self.send("gone", reason=reason, code=code)
        self.say(reason)
        # The main thread may wait in a collective for the one that is gone; only the process's end frees it.
        end(code)


ALONE = Job(None, HostsConfig(), {0: socket.gethostname()}, {})


@contextlib.contextmanager
def joined(seat: ProcessInfo | None, config: HostsConfig, devices: list[int] | None = None):
    """Joins the job at `seat`, gives it, and leaves it; whatever ends this process ends the others, too."""
    if seat is None:
        try:
            yield ALONE
        except Exception as error:
            if code_of(error) != RESTART:
                raise
            traceback.print_exc()
            raise SystemExit(RESTART) from error
        return
    job = _join(seat, config, devices)
    try:
        yield job
        job.barrier("end")
        jax.distributed.shutdown()
        job.leave()
    except BaseException as error:
        _fail(job, error)


def _join(seat: ProcessInfo, config: HostsConfig, devices: list[int] | None) -> Job:
    place = f"process {seat.process} of {seat.processes}"
    # JAX may look for devices only after joining.
    hardware = attached() or "no accelerator (CPU devices are emulated)"
    print(f"{place}: on {socket.gethostname()} with {hardware}, joining at {seat.coordinator}", flush=True)
    limits = (config.join_seconds, config.silent_seconds)
    if seat.process == 0:
        came = rendezvous.gather(seat, *limits)
        names = {0: socket.gethostname()} | {process: host for process, (host, _) in came.items()}
        links = {process: link for process, (_, link) in came.items()}
    else:
        names, link = rendezvous.report(seat, *limits)
        links = {0: link}
    job = Job(seat, config, names, links)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    coordinator = relay.listen(seat.address) if seat.process else seat.coordinator
    if {"grpc_proxy", "https_proxy", "http_proxy"} & os.environ.keys():
        os.environ.setdefault("no_grpc_proxy", "127.0.0.1")  # no web proxy between JAX and the relay
    jax.distributed.initialize(
        coordinator, seat.processes, seat.process, devices,
        cluster_detection_method="deactivate", initialization_timeout=int(config.join_seconds),
        heartbeat_timeout_seconds=2 * math.ceil(config.silent_seconds),  # the roll call speaks first
    )  # fmt: skip
    return job


def _fail(job: Job, error: BaseException) -> None:
    """Ends this process after an error; JAX would wait at exit for processes that wait for this one."""
    code, show = code_of(error), None
    if isinstance(error, SystemExit):  # has said what there is to say
        message = getattr(error, "reason", None) or (code and f"exit code {code}") or None
    elif code == CONFIGURATION:
        message = str(error)
        show = functools.partial(print, f"train: {message}", file=sys.stderr)
    else:
        # Often the echo of another process's death, which the roll call is about to name.
        time.sleep(2)
        message = f"{type(error).__name__}: {error}"
        show = functools.partial(traceback.print_exception, error)
    job.leave(message, code)
    with contextlib.suppress(OSError):  # a full disk must not keep this process from its end
        if show:
            show()
        sys.stdout.flush()
        sys.stderr.flush()
    end(code)
