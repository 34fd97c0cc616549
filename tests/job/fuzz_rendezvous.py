"""Attacks on processes that join: python -m tests.job.fuzz_rendezvous [MESSAGES]

Threads stand for the processes of a job. While they join, clients without the secret send everything but the
protocol, or the protocol with another secret, at any length and speed. Then the job's own processes send each other
malformed messages. Every job must join, hear its own messages and notice a death; no thread may end with an exception.
"""

import concurrent.futures
import contextlib
import json
import queue
import random
import secrets
import socket
import struct
import sys
import threading
import time

from mstrain.job import authentication
from mstrain.job.link import Link, parse
from mstrain.job.process_info import ProcessInfo
from mstrain.job.rendezvous import Rendezvous, join
from mstrain.job.watch import watch

PROCESSES = 3
MEGABYTE = 2**20
ATTACKERS = 8
JOIN_SECONDS = 60.0
NUMBERS = ["Infinity", "-Infinity", "NaN", "1e400", "9" * 5000, "1" + "0" * 4400, "-0.0", "1e-400"]
HELLO = {"kind": "join", "process": 1, "processes": PROCESSES, "host": "impostor"}
TLS_HELLO = bytes.fromhex("16030100f8010000f40303") + bytes(237)


def length(rng: random.Random) -> int:
    """Any order of magnitude up to 1 MB."""
    return int(2 ** rng.uniform(0, 20))


def malformed(rng: random.Random) -> bytes:
    """Contents that are not a message, or one that no handler can use."""
    return rng.choice([
        lambda: rng.randbytes(length(rng)),
        lambda: b"[" * length(rng),
        lambda: b'{"kind":' * length(rng),
        lambda: rng.choice(NUMBERS).encode(),
        lambda: b'{"kind": "step", "step": %s}' % rng.choice(NUMBERS).encode(),
        lambda: json.dumps(HELLO | {"kind": rng.choice([None, 1, [], {}, "step"]), "step": [None]}).encode(),
        lambda: b"\xff\xfe" + "{}".encode("utf-16-le") * rng.randrange(99),
        lambda: b"",
    ])()[:MEGABYTE]  # fmt: skip


def noise(rng: random.Random) -> bytes:
    """What a client without the secret sends."""
    return rng.choice([
        lambda: malformed(rng) + b"\n",
        lambda: json.dumps(HELLO).encode() + b'\n{"kind": "end", "reason": "x", "code": 0}\n',
        lambda: TLS_HELLO,
        lambda: b"GET / HTTP/1.1\r\nHost: " + b"a" * length(rng) + b"\r\n\r\n",
        lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + rng.randbytes(length(rng)),  # as gRPC begins
        lambda: authentication.MAGIC[: rng.randrange(1, 9)],
        lambda: authentication.MAGIC + rng.randbytes(rng.choice([1, 31, 32, 33, 64, length(rng)])),
        lambda: struct.pack(">I", rng.choice([0, 1, 2**31, 2**32 - 1])) + rng.randbytes(length(rng)),
    ])()  # fmt: skip


def attack(address: tuple[str, int], seed: int, held: list[socket.socket]) -> None:
    """One client; those that stay silent are added to `held`."""
    rng = random.Random(seed)
    with contextlib.suppress(OSError):
        client = socket.create_connection(address, timeout=2)
        way = rng.choice(["at once", "slow", "silent", "half closed", "reset", "wrong secret", "answered"])
        if way == "wrong secret":
            authentication.respond(client, secrets.token_bytes(32), time.monotonic() + 2)
            raise AssertionError("a client with another secret was accepted")
        data = noise(rng)
        if way == "slow":
            for byte in data[:20]:
                client.sendall(bytes([byte]))
                time.sleep(0.005)
        elif way == "silent":
            client.sendall(data[: rng.randrange(8)])
            held.append(client)
            return
        else:
            client.sendall(data)
        if way == "half closed":
            client.shutdown(socket.SHUT_WR)
        if way in ("half closed", "answered"):
            client.settimeout(0.05)
            answer = client.recv(1000)
            assert len(answer) in (0, authentication.NONCE), answer  # at most a challenge
        if way == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()


def joins(info: ProcessInfo, secret: bytes, delay: float):
    time.sleep(delay)
    return join(info, lambda: secret, JOIN_SECONDS, 30.0)


def attacked_job(messages: int, seed: int, port: int) -> None:
    """One job joins among `messages` attacks."""
    rng, held = random.Random(seed), []
    secret = secrets.token_bytes(32)
    infos = [ProcessInfo(f"127.0.0.1:{port}", PROCESSES, process) for process in range(PROCESSES)]
    with Rendezvous(infos[0], secret, 30.0) as first, concurrent.futures.ThreadPoolExecutor(ATTACKERS + 2) as pool:
        attacks = [pool.submit(attack, infos[0].address, rng.random(), held) for _ in range(messages)]
        others = [
            threads.submit(joins, info, secret, rng.uniform(0, 0.3))
            for threads in [concurrent.futures.ThreadPoolExecutor(PROCESSES)]
            for info in infos[1:]
        ]
        links = {process: entry for process, (_, entry) in first.wait_for_all(JOIN_SECONDS).items()}
        assert sorted(links) == [1, 2]
        own = [other.result()[1] for other in others]
        for attacked in attacks:
            attacked.result()
    for client in held:
        client.close()
    check_messages(links, own, rng)


def check_messages(links: dict[int, Link], own: list[Link], rng: random.Random) -> None:
    """Malformed messages of process 1 are dropped, the next one is heard, and its death is noticed."""
    events, dropped = queue.Queue(), []
    watch(
        links,
        lambda process, message: events.put((process, int(message["step"]))),
        lambda process: events.put((process, "gone")),
        lambda process, error: dropped.append(error),
    )
    bad = [content for content in (malformed(rng) for _ in range(10)) if not is_usable(content)]
    for content in bad:
        own[0].socket.sendall(own[0].codec.wrap(content))
    own[0].send({"kind": "step", "step": 7})
    assert events.get(timeout=20) == (1, 7)
    assert len(dropped) == len(bad)
    own[0].close()
    assert events.get(timeout=20) == (1, "gone")
    own[1].socket.sendall(b"\0\0\0\5" + bytes(40))  # not sealed
    assert events.get(timeout=20) == (2, "gone")
    for entry in [*links.values(), *own]:
        entry.socket.close()


def is_usable(content: bytes) -> bool:
    """Whether `check_messages` would take it."""
    try:
        int(parse(content)["step"])
    except (ValueError, TypeError, KeyError, OverflowError):
        return False
    return True


def fuzz(messages: int, jobs: int, seed: int) -> None:
    """`jobs` jobs among `messages` attacks in all."""
    failures, hook = [], threading.excepthook
    threading.excepthook = lambda arguments: failures.append(arguments.exc_value)
    try:
        for job in range(jobs):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            attacked_job(messages // jobs, seed + job, port)
    finally:
        threading.excepthook = hook
    assert not failures, failures


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 5000
    begun = time.monotonic()
    fuzz(count, max(count // 200, 1), secrets.randbelow(10**9))
    seconds = time.monotonic() - begun
    print(f"{count} attacks on {max(count // 200, 1)} jobs in {seconds:.0f} s: all joined, none crashed")
