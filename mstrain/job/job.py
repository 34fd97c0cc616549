"""A job of several processes: they join, exchange messages, compare values, and end together.

Error messages name the missing process: within `hosts.join_seconds` at the start, at once when a process dies, within
`hosts.silent_seconds` when its host is lost, and within `hosts.barrier_seconds` at a barrier.

JAX's coordination service provides barriers and exchanged values, and its heartbeats are a fallback for the
rendezvous. This module adds what JAX lacks, measured with jax 0.9.0, 0.10.2 and 0.12.0.1:

- JAX detects a dead process by heartbeats only (after 20 s with a timeout of 20 s) and aborts the others with a message
  that names no host. Here the others learn of it at once, name the process, and exit with the code for a restart.
- `jax_enable_recoverability` keeps the other processes running but reports nothing to them, and they still abort when
  process 0 dies. The callback that should replace the abort crashes (std::bad_cast).
- The preemption sync point handles SIGTERM only: no SIGINT, SIGHUP, second signal or request by the program, and
  nothing in a run of one process.
- Orbax uses JAX's barriers, which do not end when a process fails (see save_barrier.py).
- The service does not authenticate clients (jax 0.12 adds mutual TLS, which needs certificates). Here it is reachable
  only over the authenticated links of the rendezvous.
"""

import contextlib
import dataclasses
import functools
import math
import resource
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from mstrain.checks import TransientError
from mstrain.job.ending import end
from mstrain.job.exit_codes import CONFIGURATION, RESTART, MissingProcess, code_of
from mstrain.job.link import Link
from mstrain.job.process_info import ProcessInfo
from mstrain.job.relay import Relay, socket_file
from mstrain.job.rendezvous import Rendezvous, connect, join
from mstrain.job.secret import new_secret, offered_secret, read_secret
from mstrain.job.watch import watch
from mstrain.mesh import attached

MAX_EARLY = 1000  # messages kept until a handler is registered
DESCRIPTORS = 4  # of process 0 for each other process: a link, and both sides of the relay and of JAX's service
MAX_REPORTS = 10  # log lines about dropped messages


@dataclasses.dataclass(frozen=True)
class HostsConfig:
    """Time limits between the processes of a job."""

    join_seconds: float = 300.0
    """Seconds for all processes to join."""
    silent_seconds: float = 60.0
    """Seconds without network traffic from a host after which it counts as lost."""
    barrier_seconds: float = 600.0
    """Seconds to wait for all processes at a barrier."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if not 1 <= getattr(self, field.name) < math.inf:
                raise ValueError(
                    f"hosts.{field.name}={getattr(self, field.name)} is not a number of seconds from 1 on. "
                    f"Type hosts.{field.name}=60."
                )


class Job:
    """The processes of a run. With one process, all methods return at once."""

    def __init__(self, info: ProcessInfo | None, config: HostsConfig, names: dict[int, str], links: dict[int, Link]):
        self.process, self.processes = (info.process, info.processes) if info else (0, 1)
        self.config, self.names, self._links = config, names, links
        self._left: set[int] = set()
        self._handlers: dict[str, Callable[[int, dict], None]] = {"leave": self._on_leave, "end": self._on_end}
        self._used: dict[str, int] = {}
        self._early: list[tuple[int, dict]] = []
        self._dropped = 0
        self._handling = threading.RLock()
        if links:
            watch(links, self._handle, self._lost, self._drop)

    @property
    def leads(self) -> bool:
        """Whether this is process 0, which creates files and prints."""
        return self.process == 0

    def on(self, kind: str, handler: Callable[[int, dict], None]) -> None:
        """Calls `handler(process, message)` for messages of this kind, from a separate thread."""
        with self._handling:
            self._handlers[kind] = handler
            early, self._early = self._early, []
            for process, message in early:
                try:
                    self._handle(process, message)
                except Exception as error:  # as in `watch`
                    self._drop(process, error)

    def send(self, kind: str, **values) -> None:
        """Process 0 sends to all others, the others send to process 0. With one process, nothing is sent."""
        for link in self._links.values():
            link.send({"kind": kind, **values})

    def all_gather(self, name: str, value: str, seconds: float = 0) -> list[str]:
        """The `value` of every process, in order. All processes call it with the same `name`.

        Raises MissingProcess, which names the processes that do not arrive within `hosts.barrier_seconds`, or `seconds`
        if that is longer.
        """
        if self.processes == 1:
            return [value]
        from jax._src.distributed import global_state

        client = global_state.client
        assert client is not None
        self._used[name] = self._used.get(name, 0) + 1  # keys of the service are never reused
        key = f"mstrain/{name}/{self._used[name]}"
        client.key_value_set(f"{key}/{self.process}", value)
        seconds = max(seconds, self.config.barrier_seconds)
        try:
            client.wait_at_barrier(key, int(seconds * 1000))
        except jax.errors.JaxRuntimeError as error:
            came = {int(path.rpartition("/")[2]) for path, _ in client.key_value_dir_get(key)}
            missing = ", ".join(self.name(p) for p in range(self.processes) if p not in came)
            raise MissingProcess(
                f"Barrier {name!r}: {missing or 'some process'} did not arrive within {seconds:.0f} s. "
                "Look at its output; type hosts.barrier_seconds= above the time it needs."
            ) from error
        values = [client.key_value_try_get(f"{key}/{process}") for process in range(self.processes)]
        if self._used[name] > 1:  # all processes have read the values of the previous call
            client.key_value_delete(f"mstrain/{name}/{self._used[name] - 1}/{self.process}")
        return values

    def barrier(self, name: str) -> None:
        """Waits for all processes. Raises MissingProcess as `all_gather`."""
        self.all_gather(name, "")

    def agree(self, what: str, value: str) -> None:
        """Raises ValueError, which names the processes, unless `value` is the same on all processes."""
        values = self.all_gather(f"agree on {what}", value)
        others = [self.name(process) for process, other in enumerate(values) if other != values[0]]
        if others:
            raise ValueError(
                f"{', '.join(others)}: different {what} from process 0. Start all processes with the same command."
            )

    def name(self, process: int) -> str:
        """`process 1 (host)`."""
        return f"process {process} ({self.names[process]})" if process in self.names else f"process {process}"

    def log(self, text: str) -> None:
        """Prints a line of this process. Ignores a full disk."""
        with contextlib.suppress(OSError):
            print(f"process {self.process} of {self.processes}: {text}", flush=True)

    def leave(self, reason: str | None = None, code: int = 0) -> None:
        """Reports that this process ends. With a reason, the other processes end with the same exit code."""
        self.send("leave", reason=reason and reason[:2000], code=code)

    def _handle(self, process: int, message: dict) -> None:
        with self._handling:
            if handler := self._handlers.get(message["kind"]):
                handler(process, message)
            elif len(self._early) < MAX_EARLY:  # another process is ahead of this one
                self._early.append((process, message))
            else:
                raise ValueError(f"unknown kind of message {message['kind']!r}")

    def _drop(self, process: int, error: Exception) -> None:
        self._dropped += 1
        if self._dropped <= MAX_REPORTS:
            last = " (the last one reported)" if self._dropped == MAX_REPORTS else ""
            self.log(f"dropped a message of {self.name(process)}: {error!r}"[:300] + last)

    def _on_leave(self, process: int, message: dict) -> None:
        self._left.add(process)
        if message.get("reason"):
            self._end(f"{self.name(process)} ended: {message['reason']}", _failure(message.get("code")))

    def _on_end(self, _: int, message: dict) -> None:
        self._end(str(message.get("reason")), _failure(message.get("code")))

    def _lost(self, process: int) -> None:
        if process not in self._left:
            self._end(
                f"{self.name(process)} died without a message: killed, crashed, or its host is lost. Ending; "
                "the same command on all hosts resumes from the newest checkpoint.",
                RESTART,
            )

    def _end(self, reason: str, code: int) -> None:
        self.send("end", reason=reason, code=code)
        self.log(reason)
        # The main thread may wait in a collective for the dead process, so only exiting helps.
        end(code)


def _failure(code) -> int:
    """The exit code in a message; RESTART unless it is a failure."""
    return code if isinstance(code, int) and 0 < code < 256 else RESTART


ALONE = Job(None, HostsConfig(), {0: socket.gethostname()}, {})


@contextlib.contextmanager
def joined(
    info: ProcessInfo | None, config: HostsConfig, run_dir: str | Path, devices: list[int] | None = None
) -> Iterator[Job]:
    """Joins the job, yields it, and leaves it. Any error in this process ends the others, too.

    The processes read their secret from the folder `run_dir`, unless it is in the environment.
    """
    if info is None:
        try:
            yield ALONE
        except Exception as error:
            if code_of(error) != RESTART or isinstance(error, TransientError):
                raise
            traceback.print_exc()
            raise SystemExit(RESTART) from error
        return
    # JAX may initialize devices only after joining.
    hardware = attached() or "no accelerator (CPU devices are emulated)"
    host = socket.gethostname()
    print(
        f"process {info.process} of {info.processes}: on {host} with {hardware}, joining at {info.coordinator}",
        flush=True,
    )
    job = (_join if info.process else _lead)(info, config, run_dir, devices)
    try:
        yield job
        job.barrier("end")
        jax.distributed.shutdown()
        job.leave()
    except BaseException as error:
        _fail(job, error)


def _lead(info: ProcessInfo, config: HostsConfig, run_dir: str | Path, devices: list[int] | None) -> Job:
    """Process 0: waits for all others, starts JAX's service, and then closes its port."""
    seconds, silent, relay = config.join_seconds, config.silent_seconds, Relay()
    _allow_descriptors(DESCRIPTORS * info.processes)
    secret = new_secret()
    with (
        socket_file() as path,
        Rendezvous(info, secret, silent, lambda link: relay.to_service(link, path, seconds)) as rendezvous,
        offered_secret(run_dir, info.coordinator, secret),  # after the port was free: no other job at this address
    ):
        if rendezvous.note:
            print(f"process 0 of {info.processes}: {rendezvous.note}", flush=True)
        others = rendezvous.wait_for_all(seconds)
        names = {0: socket.gethostname()} | {process: host for process, (host, _) in others.items()}
        job = Job(info, config, names, {process: link for process, (_, link) in others.items()})
        _initialize(info, config, devices, path)
    if rendezvous.refused:
        job.log(f"refused {rendezvous.refused} connections without the job's secret")
    return job


def _join(info: ProcessInfo, config: HostsConfig, run_dir: str | Path, devices: list[int] | None) -> Job:
    """Every other process: joins at process 0 and connects JAX to its service."""
    seconds, silent = config.join_seconds, config.silent_seconds
    names, link, secret = join(info, functools.partial(read_secret, run_dir, info.coordinator), seconds, silent)
    job = Job(info, config, names, {0: link})
    deadline = time.monotonic() + seconds
    with Relay().to_process_0(lambda: connect(info, secret, deadline, silent, "relay")) as path:
        _initialize(info, config, devices, path)
    return job


def _allow_descriptors(count: int) -> None:
    """Raises the soft limit, often 1024, so that `count` more files can be open, as far as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        wanted = soft + count if hard == resource.RLIM_INFINITY else min(soft + count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _initialize(info: ProcessInfo, config: HostsConfig, devices: list[int] | None, path: str) -> None:
    """Connects JAX to its service at the socket `path`, which it opens in process 0."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"unix:{path}", info.processes, info.process, devices, coordinator_bind_address=f"unix:{path}",
        cluster_detection_method="deactivate", initialization_timeout=int(config.join_seconds),
        heartbeat_timeout_seconds=2 * math.ceil(config.silent_seconds),  # the rendezvous reports first
    )  # fmt: skip


def _fail(job: Job, error: BaseException) -> None:
    """Exits after an error. A normal exit would wait in JAX for processes that wait for this one."""
    code, show = code_of(error), None
    if isinstance(error, SystemExit):  # its reason is already printed
        message = getattr(error, "reason", None) or (code and f"exit code {code}") or None
    elif code == CONFIGURATION or isinstance(error, TransientError):
        message = str(error)
        show = functools.partial(print, f"train: {message}", file=sys.stderr)
    else:
        # Often a consequence of another process's death, which the rendezvous reports within this time.
        time.sleep(2)
        message = f"{type(error).__name__}: {error}"
        show = functools.partial(traceback.print_exception, error)
    job.leave(message, code)
    with contextlib.suppress(OSError):  # a full disk must not prevent the exit
        if show:
            show()
        sys.stdout.flush()
        sys.stderr.flush()
    end(code)
