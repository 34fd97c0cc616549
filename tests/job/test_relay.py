"""The relay to process 0: bytes pass both ways, and its death does not."""

import contextlib
import gc
import os
import socket
import stat
import threading
from pathlib import Path

import pytest

from mstrain.job.authentication import FrameCodec
from mstrain.job.link import Link
from mstrain.job.relay import Relay, socket_file

PATIENCE = 20  # seconds


@contextlib.contextmanager
def service():
    with socket_file() as path, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        listener.settimeout(PATIENCE)
        yield path, listener


@contextlib.contextmanager
def relayed(ends: list):
    """JAX's client and its service, with both relays between; the ends of the network are added to `ends`.

    As in a job, nothing but the connections is left.
    """
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(PATIENCE)
    with service() as (path, listener):

        def connect() -> Link:
            near, far = socket.socketpair()
            ends.extend([near, far])
            Relay().to_service(Link(far, FrameCodec(b"server", b"client")), path, PATIENCE)
            return Link(near, FrameCodec(b"client", b"server"))

        with Relay().to_process_0(connect) as local:
            client.connect(local)
            server = listener.accept()[0]
    server.settimeout(PATIENCE)
    gc.collect()
    with client, server:
        yield client, server


def exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        data += connection.recv(count - len(data)) or pytest.fail("closed")
    return data


def test_bytes_pass_both_ways():
    block = bytes(range(256)) * 4096  # more than any buffer between
    with relayed([]) as (client, server):
        for one, other in ((client, server), (server, client)):
            sender = threading.Thread(target=one.sendall, args=(block,))
            sender.start()
            assert exactly(other, len(block)) == block
            sender.join()


@pytest.mark.parametrize("end", ["service", "network"])
def test_the_end_of_the_far_side_is_silence(end):
    ends = []
    with relayed(ends) as (client, server):
        (server if end == "service" else ends[1]).shutdown(socket.SHUT_RDWR)
        client.settimeout(0.3)
        for _ in range(3):
            client.sendall(b"still there?")
            with pytest.raises(TimeoutError):
                client.recv(1)


def test_the_end_of_the_near_side_is_passed_on():
    with relayed([]) as (client, server):
        client.close()
        assert server.recv(1) == b""


def test_before_process_0_answers_clients_are_turned_away():
    def connect():
        raise ConnectionRefusedError

    with Relay().to_process_0(connect) as path, socket.socket(socket.AF_UNIX) as client:
        client.settimeout(PATIENCE)
        client.connect(path)
        assert client.recv(1) == b""


@pytest.mark.parametrize("name", ["x" * 120, "a b%20"])
def test_a_socket_file_is_of_this_user_alone_and_removed(tmp_path, monkeypatch, name):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / name))
    os.mkdir(tmp_path / name)
    with service() as (path, _):
        folder = Path(path).parent
        assert name not in path
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists()
