"""Messages, JSON objects with a `kind`, over an authenticated connection."""

import json
import math
import socket
import threading
import time
import typing

from mstrain.job.authentication import FrameCodec

SEND_SECONDS = 10.0  # for one message; a peer that reads nothing for longer counts as lost
BLOCK = 2**16  # bytes read at once


class Link:
    """One end of the connection. Any thread may send, one thread reads."""

    def __init__(self, connection: socket.socket, codec: FrameCodec):
        self.socket, self.codec = connection, codec
        self.arrived: list[bytes] = []  # received contents that are not yet parsed
        self._lock = threading.Lock()

    def send(self, message: dict) -> None:
        """Sends a message. The reading thread detects a closed connection."""
        content = json.dumps(message, allow_nan=False).encode()
        with self._lock:
            try:
                self.socket.sendall(self.codec.wrap(content))
            except OSError:  # part of a frame may have been sent: nothing can follow it
                self.close()

    def receive(self) -> list[bytes] | None:
        """Contents that have arrived, for `parse`; waits up to the socket's timeout. None when the connection is closed
        or the bytes are not authenticated."""
        try:
            data = self.socket.recv(BLOCK)
            return self.codec.unwrap(data) if data else None
        except (BlockingIOError, TimeoutError):
            return []
        except OSError:
            return None

    def receive_message(self, deadline: float) -> dict:
        """The next message. Raises OSError when the connection is closed or at `deadline`, ValueError from `parse`."""
        while not self.arrived:
            self.socket.settimeout(max(deadline - time.monotonic(), 0.001))
            contents = self.receive()
            if contents is None:
                raise ConnectionResetError("the connection ended")
            if not contents and time.monotonic() > deadline:
                raise TimeoutError("no message came in time")
            self.arrived += contents
        self.socket.settimeout(SEND_SECONDS)
        return parse(self.arrived.pop(0))

    def is_open(self) -> bool:
        """Whether the peer still keeps the connection open."""
        try:
            self.socket.settimeout(0)
            return bool(self.socket.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            if self.socket.fileno() >= 0:
                self.socket.settimeout(SEND_SECONDS)

    def close(self) -> None:
        """Ends the connection for both sides; a thread that reads it sees the end."""
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


def parse(content: bytes) -> dict:
    """The message in a frame. Raises ValueError for anything but a JSON object with a `kind` and finite numbers."""
    try:
        message = json.loads(content, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a message: {type(error).__name__}: {error}") from None
    if not (isinstance(message, dict) and isinstance(message.get("kind"), str)):
        raise ValueError("not a message: no object with a kind")
    return message


def _refuse(constant: str) -> typing.NoReturn:
    raise ValueError(f"{constant} is not a number")


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _refuse(digits)


def keep_alive(connection: socket.socket, silent: float) -> socket.socket:
    """Lets the kernel end the connection to a host that has been silent for `silent` seconds (at least 3), such as
    one that lost power. When only a process dies, the kernel of its host closes its connections at once."""
    third = max(int(silent / 3), 1)
    options = {"TCP_KEEPIDLE": third, "TCP_KEEPINTVL": third, "TCP_KEEPCNT": 2}
    # Keepalive does not run while sent bytes wait for their acknowledgement.
    options["TCP_USER_TIMEOUT"] = int(1000 * silent)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        if hasattr(socket, name):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection
