"""Which processes take part in a job, before and beside JAX: one connection from every process to process 0.

JAX ends a process that waits for others without saying for whom. Here every process first joins at the
coordinator's port; process 0 answers when all are there, or names those that are missing. The connections stay
open as the sign of life: the kernel closes them when a process dies, however it dies, and the others learn of it
at once. Small messages use them, too: `bye` before a process leaves, and the questions by which all processes
stop after the same step.
"""

import socket
import threading
import time
from collections.abc import Callable

from mstrain.job.door import TICK, Door
from mstrain.job.exit_codes import MissingProcess
from mstrain.job.link import SEND_SECONDS, Link, keep_alive
from mstrain.job.process_info import ProcessInfo
from mstrain.job.seal import HANDSHAKE_SECONDS, NotAuthenticated, Seal, respond
from mstrain.job.secret import REMEDY

NAME_LENGTH = 255  # of a host name


class Rendezvous:
    """Process 0's side. Processes can join, and open further connections for `relay`, inside this context.

    `relay(link)` is called, in a thread of its own, for each connection that a process opens to JAX's service.
    `silent` is in seconds.
    """

    def __init__(self, info: ProcessInfo, secret: bytes, silent: float, relay: Callable = lambda *_: None):
        self._info, self._silent, self._relay = info, silent, relay
        self._joined: dict[int, tuple[str, Link]] = {}
        self._changed = threading.Condition()
        self._accepting = True
        self._door = Door(info.address, secret, self._admit)
        self.note = self._door.note

    @property
    def refused(self) -> int:
        """Connections that came without the job's secret."""
        return self._door.refused

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._door.close()

    def wait_for_all(self, seconds: float) -> dict[int, tuple[str, Link]]:
        """Process -> (host name, link) of all other processes.

        Raises MissingProcess that names the missing after `seconds`, and sends those that came the same text.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            while not self._complete() and time.monotonic() < deadline:
                if not self._changed.wait(TICK):
                    self._forget_the_gone()
            self._accepting = False
        links = [link for _, link in self._joined.values()]
        missing = sorted(set(range(1, self._info.processes)) - self._joined.keys())
        if missing:
            error = self._describe(missing, seconds)
            for link in links:
                link.send({"kind": "refused", "reason": error, "missing": True})
            raise MissingProcess(error)
        names = {str(process): host for process, (host, _) in self._joined.items()}
        for link in links:
            link.send({"kind": "present", "names": names | {"0": socket.gethostname()}})
        return self._joined

    def _complete(self) -> bool:
        if len(self._joined) == self._info.processes - 1:
            self._forget_the_gone()
        return len(self._joined) == self._info.processes - 1

    def _forget_the_gone(self) -> None:
        """A process that left may come again."""
        self._joined = {process: entry for process, entry in self._joined.items() if entry[1].is_open()}

    def _describe(self, missing: list[int], seconds: float) -> str:
        came = ", ".join(["0", *(f"{process} ({host})" for process, (host, _) in sorted(self._joined.items()))])
        return (
            f"{'Process' if len(missing) == 1 else 'Processes'} {', '.join(map(str, missing))} of "
            f"{self._info.processes} did not join at {self._info.coordinator} within {seconds:.0f} s (joined: {came}). "
            + (f"{self.refused} connections came without the job's secret. " if self.refused else "")
            + "Start every process with the same command, or type hosts.join_seconds= above the time they need."
        )

    def _admit(self, connection: socket.socket, seal: Seal) -> None:
        """Adds the authenticated process if its number is free, or reports to it why not."""
        link = Link(keep_alive(connection, self._silent), seal)
        try:
            hello = link.receive_message(time.monotonic() + HANDSHAKE_SECONDS)
            process, processes, host = int(hello["process"]), int(hello["processes"]), str(hello["host"])[:NAME_LENGTH]
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            connection.close()
            return
        if hello["kind"] == "relay":
            self._relay(link)
            return
        with self._changed:
            if not self._accepting:  # the process tries again until its own time is up
                connection.close()
                return
            refusal = self._refusal(process, processes, host)
            if not refusal:
                link.send({"kind": "welcome"})
                self._joined[process] = (host, link)
                self._changed.notify()
                return
        link.send({"kind": "refused", "reason": f"{refusal} Correct process= or processes=."})
        link.close()

    def _refusal(self, process: int, processes: int, host: str) -> str | None:
        if processes != self._info.processes or not 0 < process < processes:
            return (
                f"Process 0 expects processes={self._info.processes} "
                f"and this one was started with process={process} processes={processes}."
            )
        first = self._joined.get(process)
        if first and first[1].is_open():
            return f"Two processes have process={process}: this one on {host} and one on {first[0]}."
        return None


def join(
    info: ProcessInfo, read_secret: Callable[[], bytes | None], seconds: float, silent: float
) -> tuple[dict[int, str], Link, bytes]:
    """Every other process: joins; host name of every process, the link to process 0, and the secret.

    Reads the secret anew for every attempt, as process 0 may replace it. Raises MissingProcess when process 0
    does not answer within `seconds` or reports who is missing, ValueError when it refuses this process.
    """
    deadline, failure = time.monotonic() + seconds, None
    while True:
        try:
            link, secret = _attempt(info, read_secret, deadline, silent)
            break
        except OSError as error:
            if not isinstance(failure, NotAuthenticated):  # explains more than that the port is closed by now
                failure = error
            if time.monotonic() > deadline:
                raise MissingProcess(_no_answer(info, seconds, failure)) from None
            time.sleep(TICK)
    try:
        # Process 0 may have begun to wait later than this one, and reports at its own deadline who is missing.
        answer = link.receive_message(time.monotonic() + seconds + 10)
    except OSError:
        raise MissingProcess(
            f"Process 0 at {info.coordinator} left before all processes had joined. Its own message says why."
        ) from None
    if answer["kind"] == "refused":
        raise (MissingProcess if answer.get("missing") else ValueError)(str(answer["reason"]))
    return {int(process): str(host) for process, host in answer["names"].items()}, link, secret


def connect(info: ProcessInfo, secret: bytes, deadline: float, silent: float, kind: str) -> Link:
    """An authenticated connection to process 0, which has been sent a first message of `kind`. Raises OSError."""
    deadline = min(deadline, time.monotonic() + HANDSHAKE_SECONDS)
    connection = socket.create_connection(info.address, timeout=max(deadline - time.monotonic(), 0.1))
    try:
        link = Link(connection, respond(keep_alive(connection, silent), secret, deadline))
    except BaseException:
        connection.close()
        raise
    connection.settimeout(SEND_SECONDS)
    host = socket.gethostname()[:NAME_LENGTH]
    link.send({"kind": kind, "process": info.process, "processes": info.processes, "host": host})
    return link


def _attempt(info: ProcessInfo, read_secret, deadline: float, silent: float) -> tuple[Link, bytes]:
    """The link after process 0 has accepted this process, and the secret.

    Raises OSError when another attempt may succeed, ValueError when process 0 refuses this process.
    """
    secret = read_secret()
    if secret is None:
        raise FileNotFoundError("no secret of this job yet")
    link = connect(info, secret, deadline, silent, "join")
    answer = link.receive_message(time.monotonic() + HANDSHAKE_SECONDS)
    if answer["kind"] == "refused":
        raise ValueError(str(answer["reason"]))
    return link, secret


def _no_answer(info: ProcessInfo, seconds: float, error: OSError) -> str:
    text = f"Process 0 of {info.processes} "
    if isinstance(error, NotAuthenticated):
        return f"{text}or another program answers at {info.coordinator} with another secret ({error}). {REMEDY}"
    if isinstance(error, FileNotFoundError):
        return (
            f"{text}wrote no secret into run_dir within {seconds:.0f} s. Start it, and type the same coordinator= "
            f"and a run_dir= that is shared by all processes. Otherwise: {REMEDY}"
        )
    return (
        f"{text}does not answer at {info.coordinator} for {seconds:.0f} s ({error}). Start it, or correct coordinator=."
    )
