"""The port of process 0 while processes join. Every client is authenticated first.

Each connection has its own thread and deadline, so that slow and silent clients do not delay others. There are at most
MAX_PENDING unauthenticated connections; a further one closes the oldest. A legitimate client needs only a few round
trips and is not the oldest. The port is closed when all processes have joined.
"""

import errno
import ipaddress
import socket
import threading
import time
from collections.abc import Callable

from mstrain.job.authentication import HANDSHAKE_SECONDS, FrameCodec, challenge

MAX_PENDING = 64
TICK = 0.2  # seconds


class Listener:
    """Listens at (host, port), authenticates each client in a thread and calls `admit(connection, codec)` there."""

    def __init__(self, address: tuple[str, int], secret: bytes, admit: Callable[[socket.socket, FrameCodec], None]):
        self._secret, self._admit = secret, admit
        self._pending: dict[socket.socket, None] = {}  # in order of arrival
        self._lock = threading.Lock()
        self._open = True
        self.refused = 0  # connections that were not authenticated
        self._listeners, self.note = listen(address)
        for listener in self._listeners:
            threading.Thread(target=self._accept, args=(listener,), name="listener", daemon=True).start()

    def close(self) -> None:
        """Stops listening and closes all unauthenticated connections."""
        with self._lock:
            self._open = False
            for connection in (*self._listeners, *self._pending):
                _shut(connection)

    def _accept(self, listener: socket.socket) -> None:
        listener.settimeout(TICK)
        with listener:
            while self._open:
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                except OSError:  # closed, or the client has left already, or file descriptors ran out
                    time.sleep(TICK if self._open else 0)
                    continue
                try:
                    self._hold(connection)
                    threading.Thread(target=self._greet, args=(connection,), name="handshake", daemon=True).start()
                except RuntimeError:  # threads ran out
                    self._release(connection)
                    connection.close()

    def _hold(self, connection: socket.socket) -> None:
        with self._lock:
            if len(self._pending) == MAX_PENDING:
                oldest = next(iter(self._pending))
                del self._pending[oldest]
                _shut(oldest)
            self._pending[connection] = None
            if not self._open:
                _shut(connection)

    def _release(self, connection: socket.socket) -> None:
        with self._lock:
            self._pending.pop(connection, None)

    def _greet(self, connection: socket.socket) -> None:
        try:
            codec = challenge(connection, self._secret, time.monotonic() + HANDSHAKE_SECONDS)
        except OSError:
            with self._lock:
                self.refused += 1
            codec = None
        self._release(connection)
        if codec is None:
            connection.close()
        else:
            self._admit(connection, codec)


def listen(address: tuple[str, int]) -> tuple[list[socket.socket], str | None]:
    """Sockets that listen at `address` (host, port), and a note to print when they listen on all addresses.

    They are bound to those addresses of the host that this machine has. All addresses are used when it has none of them
    (a service or a translated address), when the host cannot be resolved, and when its name maps to loopback only (as
    many distributions do with their own name). Raises ValueError when the port is taken.
    """
    host, port = address
    listeners = []
    try:
        for family, sockaddr in _candidates(host, port):
            try:
                listeners.append(socket.create_server(sockaddr, family=family, backlog=1024))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
        if listeners:
            return listeners, None
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        dual = family == socket.AF_INET6
        everywhere = socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=1024)
    except OSError as error:
        for listener in listeners:
            listener.close()
        raise ValueError(
            f"Process 0 cannot listen on port {port} ({error.strerror}). Type another port in coordinator=, "
            "for every process."
        ) from None
    return [everywhere], f"{host} is not an address of this machine; listening on all of its addresses until all joined"


def _candidates(host: str, port: int) -> list[tuple[socket.AddressFamily, tuple]]:
    """Families and addresses under which other machines may reach `host`."""
    addresses = _resolve(host, port, socket.AI_NUMERICHOST)
    if addresses or host.lower().partition(".")[0] == "localhost":
        return addresses or _resolve(host, port)
    addresses = _resolve(host, port)
    loopback = [ipaddress.ip_address(str(sockaddr[0]).partition("%")[0]).is_loopback for _, sockaddr in addresses]
    return [] if all(loopback) else addresses


def _resolve(host: str, port: int, flags: int = 0) -> list[tuple[socket.AddressFamily, tuple]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys((family, sockaddr) for family, _, _, _, sockaddr in found))


def _shut(connection: socket.socket) -> None:
    """Shuts down a connection that another thread reads and closes."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
