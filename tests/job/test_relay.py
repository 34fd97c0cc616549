"""The relay to process 0: bytes pass both ways, and its death does not."""

import socket
import threading

import pytest

from mstrain.job import relay

PATIENCE = 5  # seconds


@pytest.fixture
def server():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), PATIENCE)


def exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        data += connection.recv(count - len(data)) or pytest.fail("closed")
    return data


def test_bytes_pass_both_ways(server):
    block = bytes(range(256)) * 4096  # more than any buffer on the way
    with connect(relay.listen(server.getsockname())) as near, server.accept()[0] as far:
        for one, other in ((near, far), (far, near)):
            sender = threading.Thread(target=one.sendall, args=(block,))
            sender.start()
            assert exactly(other, len(block)) == block
            sender.join()


def test_the_end_of_the_far_side_is_silence(server):
    with connect(relay.listen(server.getsockname())) as near:
        far, _ = server.accept()
        far.close()
        near.settimeout(0.3)
        for _ in range(3):  # the first of these makes the dead side answer with a reset
            near.sendall(b"still there?")
            with pytest.raises(TimeoutError):
                near.recv(1)


def test_the_end_of_the_near_side_is_told(server):
    near = connect(relay.listen(server.getsockname()))
    with server.accept()[0] as far:
        far.settimeout(PATIENCE)
        near.close()
        assert far.recv(1) == b""


def test_before_the_far_side_listens_clients_are_turned_away(server):
    address = server.getsockname()
    place = relay.listen(address)
    server.close()
    with connect(place) as near:
        assert near.recv(1) == b""
    with socket.create_server(address) as server, connect(place) as near, server.accept()[0] as far:
        near.sendall(b"now")
        assert exactly(far, 3) == b"now"
