"""A TCP relay in this process to process 0, which keeps quiet when process 0 dies.

JAX aborts a process, with words of its own, as soon as the connection to the coordination service in process
0 closes. Behind a relay it sees silence instead, and the roll call, which learns of the death at the same
moment, has the time to say who died.
"""

import contextlib
import socket
import threading

BLOCK = 2**16  # bytes


def listen(upstream: tuple[str, int]) -> str:
    """Relays whoever connects to a local port to `upstream` (host, port); returns the local HOST:PORT."""
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_accept, args=(listener, upstream), name="relay", daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"


def _accept(listener: socket.socket, upstream: tuple[str, int]) -> None:
    while True:
        near, _ = listener.accept()
        try:
            far = socket.create_connection(upstream, timeout=5)
        except OSError:  # not there yet: the client will try again
            near.close()
            continue
        far.settimeout(None)
        for connection in (near, far):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_send, args=(near, far), name="relay out", daemon=True).start()
        threading.Thread(target=_receive, args=(near, far), name="relay in", daemon=True).start()


def _send(near: socket.socket, far: socket.socket) -> None:
    """Passes on what `near` says until it closes; what a dead `far` cannot hear is dropped."""
    while data := _read(near):
        with contextlib.suppress(OSError):
            far.sendall(data)
    for connection in (near, far):
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)  # closing alone would not wake `_receive`
        connection.close()


def _receive(near: socket.socket, far: socket.socket) -> None:
    """Passes on what `far` says; its end is not passed on."""
    while data := _read(far):
        try:
            near.sendall(data)
        except OSError:
            return


def _read(connection: socket.socket) -> bytes:
    """The next bytes; none when there will be no more."""
    try:
        return connection.recv(BLOCK)
    except OSError:
        return b""
