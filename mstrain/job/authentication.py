"""Authentication of one connection between two processes that hold the job's secret, and of its frames.

The handshake is a mutual challenge and response, so that the secret itself is never sent:

    client: MAGIC, nonce_c        server: nonce_s
    client: HMAC(secret, "client", nonce_c, nonce_s)
    server: HMAC(secret, "server", nonce_c, nonce_s)

Every later frame carries an HMAC under a key that is derived from the secret and both nonces, one key per
direction, over the frame's number and its content. Frames cannot be forged, changed, replayed, reordered or
reflected. They are not encrypted.
"""

import hmac
import secrets
import socket
import struct
import time

MAGIC = b"mstrain\x01"
NONCE = DIGEST = 32  # bytes
HANDSHAKE_SECONDS = 10.0
LONGEST = 2**20  # bytes of one frame's content: the host names of a few thousand processes
_LENGTH = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")


class NotAuthenticated(ConnectionError):
    """The peer does not hold the job's secret."""


class FrameCodec:
    """Frames of one connection: length (4 bytes), HMAC-SHA256 (32 bytes), content."""

    def __init__(self, own_key: bytes, peer_key: bytes):
        self._own_key, self._peer_key = own_key, peer_key
        self._sent = self._received = 0
        self._pending = bytearray()

    def wrap(self, content: bytes) -> bytes:
        """The next frame to send. Frames must be sent in the order in which they are made."""
        assert len(content) <= LONGEST
        frame = _frame(self._own_key, self._sent, content)
        self._sent += 1
        return frame

    def unwrap(self, data: bytes) -> list[bytes]:
        """The contents of the frames that `data` completes. Raises NotAuthenticated for any other bytes."""
        self._pending += data
        contents = []
        while len(self._pending) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._pending)
            if length > LONGEST:
                raise NotAuthenticated("a frame that is too long")
            end = _LENGTH.size + DIGEST + length
            if len(self._pending) < end:
                break
            frame = bytes(self._pending[:end])
            content = frame[_LENGTH.size + DIGEST :]
            if not hmac.compare_digest(frame, _frame(self._peer_key, self._received, content)):
                raise NotAuthenticated("a frame with a wrong HMAC")
            contents.append(content)
            self._received += 1
            del self._pending[:end]
        return contents


def _frame(key: bytes, number: int, content: bytes) -> bytes:
    length = _LENGTH.pack(len(content))
    return length + hmac.digest(key, _NUMBER.pack(number) + length + content, "sha256") + content


def challenge(connection: socket.socket, secret: bytes, deadline: float) -> FrameCodec:
    """The server's part of the handshake, until time.monotonic() is `deadline`.

    Raises NotAuthenticated for a client without the secret, another OSError when the connection ends.
    """
    client_nonce = receive_exactly(connection, len(MAGIC) + NONCE, deadline, MAGIC)[len(MAGIC) :]
    server_nonce = secrets.token_bytes(NONCE)
    connection.sendall(server_nonce)
    nonces = client_nonce + server_nonce
    proof = receive_exactly(connection, DIGEST, deadline)
    if not hmac.compare_digest(proof, _digest(secret, b"client", nonces)):
        raise NotAuthenticated("a client without the job's secret")
    connection.sendall(_digest(secret, b"server", nonces))
    return FrameCodec(_digest(secret, b"server key", nonces), _digest(secret, b"client key", nonces))


def respond(connection: socket.socket, secret: bytes, deadline: float) -> FrameCodec:
    """The client's part of the handshake. Raises as `challenge` does."""
    client_nonce = secrets.token_bytes(NONCE)
    connection.sendall(MAGIC + client_nonce)
    nonces = client_nonce + receive_exactly(connection, NONCE, deadline)
    connection.sendall(_digest(secret, b"client", nonces))
    try:
        proof = receive_exactly(connection, DIGEST, deadline)
    except ConnectionError:  # a server closes the connection of a client that it does not accept
        raise NotAuthenticated("the server does not accept this process's secret") from None
    if not hmac.compare_digest(proof, _digest(secret, b"server", nonces)):
        raise NotAuthenticated("a server without the job's secret")
    return FrameCodec(_digest(secret, b"client key", nonces), _digest(secret, b"server key", nonces))


def _digest(secret: bytes, purpose: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, purpose + b"\0" + nonces, "sha256")


def receive_exactly(connection: socket.socket, count: int, deadline: float, prefix: bytes = b"") -> bytes:
    """`count` bytes, however slowly they come. Raises OSError when time is up, at the end of the stream, or as soon
    as the bytes do not begin with `prefix`."""
    data = b""
    while len(data) < count:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionResetError("the connection ended")
        data += part
        if not data.startswith(prefix[: len(data)]):
            raise NotAuthenticated("a client of another protocol")
    return data
