"""Connects every process of a job to process 0, before JAX is initialized.

When JAX times out waiting for processes, it does not name them. Here every process first joins at the coordinator's
port, and process 0 replies when all have joined, or names the missing ones. The connections stay open to detect deaths:
the kernel closes them when a process dies for any reason, and the others learn of it at once. They also carry small
messages: `leave` before a process ends, and those with which all processes stop after the same step.
"""

import socket
import threading
import time
from collections.abc import Callable

from mstrain.job.authentication import HANDSHAKE_SECONDS, FrameCodec, NotAuthenticated, respond
from mstrain.job.exit_codes import MissingProcess
from mstrain.job.link import SEND_SECONDS, Link, keep_alive
from mstrain.job.listener import TICK, Listener
from mstrain.job.process_info import ProcessInfo
from mstrain.job.secret import REMEDY

NAME_LENGTH = 255  # of a host name


class Rendezvous:
    """The side of process 0. Inside this context, processes can join and open further connections for `relay`.

    `relay(link)` is called, in a separate thread, for each connection that a process opens to JAX's service.
    `silent` is in seconds.
    """

    def __init__(self, info: ProcessInfo, secret: bytes, silent: float, relay: Callable = lambda *_: None):
        self._info, self._silent, self._relay = info, silent, relay
        self._joined: dict[int, tuple[str, Link]] = {}
        self._changed = threading.Condition()
        self._accepting = True
        self._listener = Listener(info.address, secret, self._admit)
        self.note = self._listener.note

    @property
    def refused(self) -> int:
        """Connections that came without the job's secret."""
        return self._listener.refused

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._listener.close()

    def wait_for_all(self, seconds: float) -> dict[int, tuple[str, Link]]:
        """Process -> (host name, link) of all other processes.

        Raises MissingProcess, which names the missing processes, after `seconds`, and sends its text to the joined
        ones.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            while not self._complete() and time.monotonic() < deadline:
                if not self._changed.wait(TICK):
                    self._remove_closed()
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
            self._remove_closed()
        return len(self._joined) == self._info.processes - 1

    def _remove_closed(self) -> None:
        """A process whose connection is closed may join again."""
        self._joined = {process: entry for process, entry in self._joined.items() if entry[1].is_open()}

    def _describe(self, missing: list[int], seconds: float) -> str:
        joined = ", ".join(["0", *(f"{process} ({host})" for process, (host, _) in sorted(self._joined.items()))])
        return (
            f"{'Process' if len(missing) == 1 else 'Processes'} {', '.join(map(str, missing))} of "
            f"{self._info.processes} did not join at {self._info.coordinator} within {seconds:.0f} s "
            f"(joined: {joined}). "
            + (f"{self.refused} connections came without the job's secret. " if self.refused else "")
            + "Start every process with the same command, or type hosts.join_seconds= above the time they need."
        )

    def _admit(self, connection: socket.socket, codec: FrameCodec) -> None:
        """Adds the authenticated process if its number is free, or sends it the reason why not."""
        link = Link(keep_alive(connection, self._silent), codec)
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
            if not self._accepting:  # the process retries until its own time limit
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
    """Joins as another process than 0: the host name of every process, the link to process 0, and the secret.

    Reads the secret again for every attempt, because process 0 may replace it. Raises MissingProcess when process 0
    does not answer within `seconds` or reports who is missing, ValueError when it refuses this process.
    """
    deadline, failure = time.monotonic() + seconds, None
    while True:
        try:
            link, secret = _attempt(info, read_secret, deadline, silent)
            break
        except OSError as error:
            if not isinstance(failure, NotAuthenticated):  # more informative than a port that is closed by now
                failure = error
            if time.monotonic() > deadline:
                raise MissingProcess(_no_answer(info, seconds, failure)) from None
            time.sleep(TICK)
    try:
        # Process 0 may have started later than this process, and reports missing processes at its own deadline.
        answer = link.receive_message(time.monotonic() + seconds + 10)
    except OSError:
        raise MissingProcess(
            f"Process 0 at {info.coordinator} ended before all processes had joined. See its own message."
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
