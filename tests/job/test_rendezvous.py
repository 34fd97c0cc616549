"""The rendezvous without JAX: everyone joins, someone does not, someone leaves, strangers attack. Threads stand for
processes."""

import concurrent.futures
import queue
import socket
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstrain.job import listener
from mstrain.job.authentication import FrameCodec, NotAuthenticated, challenge, respond
from mstrain.job.exit_codes import RESTART
from mstrain.job.job import HostsConfig, Job, _failure
from mstrain.job.link import parse
from mstrain.job.process_info import ProcessInfo
from mstrain.job.rendezvous import Rendezvous, _attempt, join
from mstrain.job.watch import watch
from tests.job.fuzz_rendezvous import fuzz
from tests.job.processes import free_port

SECRET = b"of these tests alone"


def infos(processes: int) -> list[ProcessInfo]:
    coordinator = f"127.0.0.1:{free_port()}"
    return [ProcessInfo(coordinator, processes, process) for process in range(processes)]


def meet(info: ProcessInfo, seconds: float = 20.0, secret: bytes = SECRET):
    """What `wait_for_all` or `join` returns, or the text of its ValueError."""
    try:
        if info.process:
            return join(info, lambda: secret, seconds, 30.0)
        with Rendezvous(info, secret, 30.0) as rendezvous:
            return rendezvous.wait_for_all(seconds)
    except ValueError as error:
        return str(error)


def meet_all(infos, seconds=20.0):
    with concurrent.futures.ThreadPoolExecutor(len(infos)) as pool:
        return list(pool.map(lambda info: meet(info, seconds), infos))


def close(results) -> None:
    for result in results:
        links = [link for _, link in result.values()] if isinstance(result, dict) else [result[1]]
        for link in links:
            link.socket.close()


def test_everyone_learns_the_host_of_everyone():
    first, *others = results = meet_all(infos(4))
    assert sorted(first) == [1, 2, 3]
    assert all(names == dict.fromkeys(range(4), socket.gethostname()) for names, *_ in others)
    close(results)


def test_the_missing_are_named_to_all_who_came_in_time():
    everyone = infos(4)
    texts = meet_all([everyone[0], everyone[2]], 2.0)
    for text in texts:
        assert "Processes 1, 3 of 4 did not join" in text and "joined: 0, 2 (" in text


def test_a_missing_coordinator_is_named():
    text = meet(infos(2)[1], 0.5)
    assert "Process 0 of 2 does not answer" in text and "coordinator=" in text


def test_two_with_one_number_are_refused():
    everyone = infos(3)
    results = meet_all([everyone[0], everyone[1], everyone[1]], 2.0)
    texts = [result for result in results if isinstance(result, str)]
    assert any("Two processes have process=1" in text for text in texts), texts


def test_another_number_of_processes_is_refused():
    everyone = infos(2)
    texts = meet_all([everyone[0], ProcessInfo(everyone[0].coordinator, 3, 1)], 2.0)
    assert "expects processes=2 and this one was started with process=1 processes=3" in texts[1]
    assert "Process 1 of 2 did not join" in texts[0]


def test_a_process_that_left_may_come_again():
    everyone = infos(3)
    with concurrent.futures.ThreadPoolExecutor(3) as pool, Rendezvous(everyone[0], SECRET, 30.0) as rendezvous:
        _attempt(everyone[1], lambda: SECRET, time.monotonic() + 20, 30.0)[0].close()
        others = [pool.submit(meet, info) for info in everyone[1:]]
        results = [rendezvous.wait_for_all(20), *(other.result() for other in others)]
    assert sorted(results[0]) == [1, 2]
    close(results)


def test_another_secret_is_refused_on_both_sides():
    everyone = infos(2)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        texts = [
            pool.submit(meet, info, 2.0, secret) for info, secret in zip(everyone, (SECRET, b"x" * 16), strict=True)
        ]
    assert "connections came without the job's secret" in texts[0].result()
    assert "another secret" in texts[1].result() and "MSTRAIN_JOB_SECRET" in texts[1].result()


def test_a_secret_replaced_while_a_process_waits_is_read_again():
    everyone, secrets = infos(2), iter([b"of an earlier attempt", None, SECRET])
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, everyone[0])
        results = [first, pool.submit(join, everyone[1], lambda: next(secrets), 20.0, 30.0)]
    results = [result.result() for result in results]
    assert sorted(results[0]) == [1] and sorted(results[1][0]) == [0, 1] and not [*secrets]
    close(results)


def test_a_death_is_noticed_at_once_and_only_once():
    results = meet_all(infos(3))
    events = queue.Queue()
    links = {process: link for process, (_, link) in results[0].items()}
    watch(links, lambda *event: events.put(event), events.put, lambda *event: events.put(event))
    results[2][1].send({"kind": "hello"})
    assert events.get(timeout=20) == (2, {"kind": "hello"})
    results[1][1].socket.close()
    assert events.get(timeout=20) == 1
    with pytest.raises(queue.Empty):
        events.get(timeout=0.2)
    close(results[:1])
    close(results[2:])


def test_a_reader_that_fails_counts_as_the_death_of_its_peers(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    results = meet_all(infos(3))
    links = {process: link for process, (_, link) in results[0].items()}
    monkeypatch.setattr(links[1], "receive", lambda: 1 / 0)
    gone = queue.Queue()
    watch(links, lambda *_: None, gone.put, lambda *_: None)
    results[1][1].send({"kind": "hello"})
    assert {gone.get(timeout=20), gone.get(timeout=20)} == {1, 2}
    close(results)


def test_silent_clients_that_came_first_delay_nobody(monkeypatch):
    """As many as can be, and more: the oldest leave."""
    monkeypatch.setattr(listener, "HANDSHAKE_SECONDS", 3600.0)
    everyone = infos(2)
    with Rendezvous(everyone[0], SECRET, 30.0) as rendezvous, concurrent.futures.ThreadPoolExecutor(1) as pool:
        silent = [socket.create_connection(everyone[0].address, 5) for _ in range(listener.MAX_PENDING + 20)]
        other = pool.submit(meet, everyone[1])
        results = [rendezvous.wait_for_all(20), other.result()]
        for client in silent[:20]:
            while client.recv(4096):  # until the server has closed it
                pass
    assert sorted(results[0]) == [1]
    for client in silent:
        client.close()
    close(results)


def test_jobs_join_among_attacks():
    fuzz(300, 3, 0)


def test_a_recorded_connection_cannot_be_replayed():
    near, far = socket.socketpair()
    with near, far, concurrent.futures.ThreadPoolExecutor(1) as pool:
        server = pool.submit(challenge, near, SECRET, time.monotonic() + 20)
        client = respond(far, SECRET, time.monotonic() + 20)
        server, frame = server.result(), client.wrap(b"once")
        assert server.unwrap(frame) == [b"once"]
        for forged in (frame, server.wrap(b"reflected"), bytes(40)):
            with pytest.raises(NotAuthenticated):
                FrameCodec(server._own_key, server._peer_key).unwrap(client.wrap(b"a later one"))
            with pytest.raises(NotAuthenticated):
                server.unwrap(forged)
            server._pending.clear()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=300), max_size=5), st.integers(1, 200), st.data())
def test_contents_arrive_whole_in_any_pieces_and_changed_ones_never(contents, piece, data):
    sender, receiver = FrameCodec(b"a", b"b"), FrameCodec(b"b", b"a")
    stream = b"".join(sender.wrap(content) for content in contents)
    pieces = [stream[i : i + piece] for i in range(0, len(stream), piece)]
    assert [content for part in pieces for content in receiver.unwrap(part)] == contents
    if stream:
        changed = bytearray(stream)
        changed[data.draw(st.integers(0, len(stream) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        received, receiver = [], FrameCodec(b"b", b"a")
        try:
            received = receiver.unwrap(bytes(changed))
        except NotAuthenticated:
            return
        assert received == contents[: len(received)] and len(received) < len(contents)  # it waits for a longer frame


@settings(max_examples=100, deadline=None)
@given(st.one_of(st.binary(max_size=80), st.text(max_size=80).map(str.encode)))
def test_any_content_is_a_message_or_refused(content):
    try:
        assert isinstance(parse(content)["kind"], str)
    except ValueError as error:
        assert "not a message" in str(error)


@pytest.mark.parametrize("code", [0, 256, -1, "0", None, 2**70, True, [1]])
def test_no_message_ends_a_process_with_success(code):
    assert _failure(code) in (RESTART, 1) and _failure(3) == 3


def test_a_message_that_comes_early_is_delivered_once_and_a_malformed_one_is_reported(capsys):
    job, heard = Job(None, HostsConfig(), {}, {}), []
    job._handle(1, {"kind": "at", "step": 1})
    job._handle(1, {"kind": "at"})
    for _ in range(2):
        job.on("at", lambda process, message: heard.append((process, message["step"])))
    assert heard == [(1, 1)] and capsys.readouterr().out.count("dropped a message") == 1


@settings(max_examples=500, deadline=None)
@given(st.text(max_size=30), st.integers(-5, 5), st.integers(-5, 5))
def test_any_place_is_taken_or_refused_with_the_fix(coordinator, processes, process):
    try:
        host, port = ProcessInfo(coordinator, processes, process).address
        assert host is not None and 0 < port < 65536
    except ValueError as error:
        assert "Type coordinator=" in str(error) or "Type process=" in str(error)


@pytest.mark.parametrize("host, found, bound", [
    ("127.0.0.1", None, ["127.0.0.1"]),
    ("localhost", None, ["127.0.0.1"]),
    ("127.1", None, ["127.0.0.1"]),
    ("node003", ["127.0.1.1"], None),  # as Debian maps a machine's own name
    ("node003", ["192.0.2.7"], None),  # a service or a translated address
    ("node003", ["192.0.2.7", "127.0.0.1"], ["127.0.0.1"]),
    ("192.0.2.7", None, None),
    ("node003", [], None),
])  # fmt: skip
def test_only_the_address_of_the_coordinator_is_listened_at(monkeypatch, host, found, bound):
    if found is not None:
        resolved = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in found]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, flags, **__: [] if flags else resolved)
    listeners, note = listener.listen((host, 0))
    addresses = [server.getsockname()[0] for server in listeners]
    for server in listeners:
        server.close()
    if bound:
        assert set(bound) <= set(addresses) <= {*bound, "::1"} and note is None
    else:
        assert addresses[0] in ("::", "0.0.0.0") and "listening on all" in note


def test_any_spelling_of_an_address_is_an_address():
    assert [address[0] for _, address in listener._candidates("0:0:0:0:0:0:0:1", 1)] == ["::1"]


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other:
        text = meet(ProcessInfo(f"127.0.0.1:{other.getsockname()[1]}", 2, 0))
    assert "cannot listen on port" in text and "Type another port" in text
