"""The roll call without JAX: everyone comes, someone does not, someone leaves, strangers knock. Threads stand
for processes."""

import concurrent.futures
import contextlib
import json
import queue
import socket
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstrain.job import rendezvous
from mstrain.job.rendezvous import Link, ProcessInfo
from tests.job.processes import free_port


def seats(processes: int) -> list[ProcessInfo]:
    coordinator = f"127.0.0.1:{free_port()}"
    return [ProcessInfo(coordinator, processes, process) for process in range(processes)]


def call(seat: ProcessInfo, seconds: float = 5.0):
    """What `gather` or `report` gives, or the text of its ValueError."""
    try:
        return (rendezvous.report if seat.process else rendezvous.gather)(seat, seconds, 30.0)
    except ValueError as error:
        return str(error)


def call_all(seats, seconds=5.0):
    with concurrent.futures.ThreadPoolExecutor(len(seats)) as pool:
        return list(pool.map(lambda seat: call(seat, seconds), seats))


def close(results) -> None:
    for result in results:
        links = [link for _, link in result.values()] if isinstance(result, dict) else [result[1]]
        for link in links:
            link.close()


def test_everyone_learns_the_host_of_everyone():
    first, *others = results = call_all(seats(4))
    assert sorted(first) == [1, 2, 3]
    assert all(names == dict.fromkeys(range(4), socket.gethostname()) for names, _ in others)
    close(results)


def test_the_missing_are_named_to_all_who_came_in_time():
    everyone = seats(4)
    begun = time.monotonic()
    texts = call_all([everyone[0], everyone[2]], 1.0)
    assert time.monotonic() - begun < 3
    for text in texts:
        assert "Processes 1, 3 of 4 did not come" in text and "came: 0, 2 (" in text


def test_a_missing_coordinator_is_named():
    text = call(seats(2)[1], 0.5)
    assert "Process 0 of 2 does not answer" in text and "coordinator=" in text


def test_two_with_one_number_are_told():
    everyone = seats(3)
    results = call_all([everyone[0], everyone[1], everyone[1]], 1.5)
    texts = [result for result in results if isinstance(result, str)]
    assert any("Two processes say process=1" in text for text in texts), texts


def test_another_number_of_processes_is_refused():
    everyone = seats(2)
    texts = call_all([everyone[0], ProcessInfo(everyone[0].coordinator, 3, 1)], 1.0)
    assert "expects processes=2 and this one says process=1 processes=3" in texts[1]
    assert "Process 1 of 2 did not come" in texts[0]


def test_a_process_that_dies_is_noticed_at_once_and_only_once():
    results = call_all(seats(3))
    links = {process: link for process, (_, link) in results[0].items()}
    events = queue.Queue()
    rendezvous.watch(
        links, lambda process, message: events.put((process, message)), lambda process: events.put(process)
    )
    results[2][1].send({"kind": "hello"})
    assert events.get(timeout=2) == (2, {"kind": "hello"})
    results[1][1].close()
    assert events.get(timeout=2) == 1
    with pytest.raises(queue.Empty):
        events.get(timeout=0.2)
    close(results)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=4))
def test_strangers_do_not_disturb_a_roll_call(noises):
    everyone = seats(2)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(call, everyone[0])
        for noise in noises:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(everyone[0].address, timeout=0.2) as stranger,
            ):
                stranger.sendall(noise + b"\n")
        second = pool.submit(call, everyone[1])
        results = [first.result(), second.result()]
    assert sorted(results[0]) == [1]
    close(results)


@settings(max_examples=1000, deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=80), st.just(b"\n"), st.builds(
    lambda value: json.dumps(value).encode(),
    st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=5),
)), max_size=6))  # fmt: skip
def test_any_bytes_are_messages_or_refused(chunks):
    near, far = socket.socketpair()
    with near, far:
        far.sendall(b"".join(chunks))
        far.close()
        link = Link(near)
        with contextlib.suppress(ValueError):
            while (messages := link.receive()) is not None:
                assert all(isinstance(message, dict) for message in messages)


@settings(max_examples=2000, deadline=None)
@given(st.text(max_size=30), st.integers(-5, 5), st.integers(-5, 5))
def test_any_seat_is_taken_or_refused_with_the_fix(coordinator, processes, process):
    try:
        host, port = ProcessInfo(coordinator, processes, process).address
        assert host is not None and 0 < port < 65536
    except ValueError as error:
        assert "Type coordinator=" in str(error) or "Type process=" in str(error)
