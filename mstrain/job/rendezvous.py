"""Who takes part in a job, before and beside JAX: one TCP connection from every process to process 0.

JAX ends a process that waits for others without saying for whom. Here every process says its number and host
to the coordinator's port first; process 0 answers when all are there, or names those that are not. The
connections stay open as the sign of life: the kernel closes them when a process dies, however it dies, and
the others learn of it at once. Small messages (one JSON object per line) travel over them, too: `bye` before
a process leaves, and the questions by which all stop after the same step.
"""

import dataclasses
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable

LONGEST = 4096  # bytes of one message; nothing legitimate comes near
RETRY_SECONDS = 0.2


@dataclasses.dataclass(frozen=True)
class ProcessInfo:
    """`process` of `processes`, that meet at `coordinator` (HOST:PORT of process 0)."""

    coordinator: str
    processes: int
    process: int

    def __post_init__(self):
        host, colon, port = self.coordinator.rpartition(":")
        if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
            raise ValueError(
                f"coordinator={self.coordinator!r} is no address. Type coordinator=HOST:PORT of process 0."
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


class Link:
    """Lines of JSON over one socket."""

    def __init__(self, connection: socket.socket):
        self.socket, self._pending = connection, b""
        self._lock = threading.Lock()

    def send(self, message: dict) -> None:
        """Sends; a peer that is gone is noticed by whoever reads."""
        with self._lock:
            try:
                self.socket.sendall(json.dumps(message).encode() + b"\n")
            except OSError:
                pass

    def receive(self) -> list[dict] | None:
        """Messages that have arrived (waiting for bytes up to the socket's timeout); None when the peer is
        gone.

        Raises ValueError for bytes that are no message.
        """
        try:
            data = self.socket.recv(LONGEST)
        except (BlockingIOError, TimeoutError):
            return []
        except OSError:
            return None
        if not data:
            return None
        *lines, self._pending = (self._pending + data).split(b"\n")
        if len(self._pending) > LONGEST:
            raise ValueError("not a message of a roll call")
        messages = [json.loads(line) for line in lines]  # what it raises for other bytes is a ValueError
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("not a message of a roll call")
        return messages

    def close(self) -> None:
        self.socket.close()


def gather(seat: ProcessInfo, seconds: float, silent: float) -> dict[int, tuple[str, Link]]:
    """Process 0: waits for all others at its port; process -> (host name, link).

    Raises ValueError that names the missing after `seconds`; whoever came is told so.
    """
    links: dict[int, tuple[str, Link]] = {}
    deadline = time.monotonic() + seconds
    with _listen(seat) as listener:
        while len(links) < seat.processes - 1 and time.monotonic() < deadline:
            listener.settimeout(min(RETRY_SECONDS, max(deadline - time.monotonic(), 0.01)))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                _drop_the_gone(links)
                continue
            _admit(seat, connection, links, silent)
    missing = sorted(set(range(1, seat.processes)) - links.keys())
    if missing:
        came = [f"{process} ({host})" for process, (host, _) in sorted(links.items())]
        error = (
            f"{_name(missing)} of {seat.processes} did not come to {seat.coordinator} within {seconds:.0f} s "
            f"(came: {', '.join(['0', *came])}). Start every process with the same command, or "
            "type hosts.join_seconds= above the time they need."
        )
        for _, link in links.values():
            link.send({"refused": error})
        raise ValueError(error)
    names = {str(process): host for process, (host, _) in links.items()}
    for _, link in links.values():
        link.send({"present": names | {"0": socket.gethostname()}})
    return links


def report(seat: ProcessInfo, seconds: float, silent: float) -> tuple[dict[int, str], Link]:
    """Every other process: says it is here; host name of every process, and the link to process 0.

    Raises ValueError when process 0 does not answer within `seconds`, or says who is missing.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            connection = socket.create_connection(seat.address, timeout=max(deadline - time.monotonic(), 0.1))
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"Process 0 of {seat.processes} does not answer at {seat.coordinator} for "
                    f"{seconds:.0f} s ({error}). Start it, or correct coordinator=."
                ) from None
            time.sleep(RETRY_SECONDS)
    link = Link(_watched(connection, silent))
    link.send({"process": seat.process, "processes": seat.processes, "host": socket.gethostname()})
    messages: list[dict] | None = []
    # Process 0 may have begun to wait later than this one, and says at its own deadline who is missing.
    connection.settimeout(seconds + 10)
    try:
        messages = link.receive()
    except ValueError:
        raise ValueError(
            f"{seat.coordinator} answers, but not to a roll call: the job has begun, or it is something else."
        ) from None
    if not messages:
        raise ValueError(
            f"Process 0 at {seat.coordinator} left before everyone had come. Its own message says why."
        )
    if "refused" in messages[0]:
        raise ValueError(str(messages[0]["refused"]))
    connection.settimeout(None)
    return {int(process): str(host) for process, host in messages[0]["present"].items()}, link


def watch(
    links: dict[int, Link], heard: Callable[[int, dict], None], gone: Callable[[int], None]
) -> threading.Thread:
    """Reads all `links` in a thread of its own: `heard(process, message)` and, once, `gone(process)`."""
    selector = selectors.DefaultSelector()
    for process, link in links.items():
        link.socket.setblocking(True)
        selector.register(link.socket, selectors.EVENT_READ, (process, link))

    def read():
        while selector.get_map():
            for key, _ in selector.select():
                process, link = key.data
                try:
                    messages = link.receive()
                except ValueError:
                    messages = None
                for message in messages or []:
                    heard(process, message)
                if messages is None:
                    selector.unregister(link.socket)
                    gone(process)

    thread = threading.Thread(target=read, name="roll call", daemon=True)
    thread.start()
    return thread


def _listen(seat: ProcessInfo) -> socket.socket:
    port = seat.address[1]
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        return socket.create_server(
            ("", port), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=seat.processes
        )
    except OSError as error:
        raise ValueError(
            f"Process 0 cannot listen on port {port} ({error.strerror}). Type another port in coordinator=, "
            "for every process."
        ) from None


def _admit(seat: ProcessInfo, connection: socket.socket, links, silent: float) -> None:
    """Adds whoever says a free number of this job; others are told why not."""
    connection.settimeout(5)
    link = Link(_watched(connection, silent))
    try:
        (hello,) = link.receive() or []
        process, processes, host = int(hello["process"]), int(hello["processes"]), str(hello["host"])[:255]
    except (ValueError, KeyError, TypeError):
        link.close()
        return
    if processes != seat.processes or not 0 < process < seat.processes:
        refusal = f"process 0 expects processes={seat.processes}"
        refusal += f" and this one says process={process} processes={processes}"
    elif process in links:
        refusal = f"two processes say process={process}: this one on {host} and one on {links[process][0]}"
    else:
        links[process] = (host, link)
        return
    link.send({"refused": f"{refusal[0].upper()}{refusal[1:]}. Correct process= or processes=."})
    link.close()


def _drop_the_gone(links) -> None:
    """Forgets processes that left while others are waited for, so that they may come again."""
    for process, (_, link) in list(links.items()):
        link.socket.settimeout(0)
        if link.receive() is None:
            del links[process]


def _watched(connection: socket.socket, silent: float) -> socket.socket:
    """A host that loses power closes nothing: the kernel asks after it, for `silent` seconds."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    third = max(int(silent / 3), 1)
    for name, value in (("TCP_KEEPIDLE", third), ("TCP_KEEPINTVL", third), ("TCP_KEEPCNT", 2)):
        if hasattr(socket, name):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def _name(processes: list[int]) -> str:
    return ("Process " if len(processes) == 1 else "Processes ") + ", ".join(map(str, processes))
