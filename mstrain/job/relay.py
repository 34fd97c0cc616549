"""Relays JAX's coordination service over the authenticated connections of the job.

By default the service does not authenticate clients and listens on all addresses. Here it listens on a socket file in a
folder that only this user can read. In every other process a relay listens on such a file and forwards to process 0
over an authenticated connection. Both stop listening when JAX has connected; JAX keeps one connection for the whole
job.

The relay also hides the death of process 0 from JAX. JAX aborts a process, with a message that names no process, as
soon as its connection to the service closes. With the relay the connection stays open, and the rendezvous has time to
report which process died.
"""

import asyncio
import contextlib
import re
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from mstrain.job.authentication import NotAuthenticated
from mstrain.job.ending import cleaned_up
from mstrain.job.link import BLOCK, Link

LONGEST_PATH = 100  # bytes of a socket file's path; systems allow 104 or 108
RETRY_SECONDS = 0.05


@contextlib.contextmanager
def socket_file() -> Iterator[str]:
    """The path for a socket in a new folder that only this user can enter."""
    folder = tempfile.mkdtemp(prefix="mstrain-")
    # gRPC reads the path as part of a URI.
    if len(folder) + 5 > LONGEST_PATH or not re.fullmatch(r"[\w./-]+", folder, re.ASCII):
        Path(folder).rmdir()
        folder = tempfile.mkdtemp(prefix="mstrain-", dir="/tmp")
    with cleaned_up(lambda: shutil.rmtree(folder, ignore_errors=True)):
        yield f"{folder}/jax"


class Relay:
    """Copies bytes between local connections of JAX and links, in one thread, as long as the process runs."""

    def __init__(self):
        self._loop = asyncio.new_event_loop()
        self._copies: set[asyncio.Task] = set()
        threading.Thread(target=self._run, name="relay", daemon=True).start()

    def _run(self) -> None:
        """The thread references this object and its tasks; asyncio keeps only weak references to tasks."""
        self._loop.run_forever()

    def to_service(self, link: Link, path: str, seconds: float) -> None:
        """Process 0: joins `link` to JAX's service at `path`, which must be there within `seconds`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            local = socket.socket(socket.AF_UNIX)
            try:
                local.connect(path)
            except OSError:  # the service starts at about the same time
                local.close()
                time.sleep(RETRY_SECONDS)
            else:
                self._start(local, link, keep_open=False)
                return
        link.close()

    @contextlib.contextmanager
    def to_process_0(self, connect: Callable[[], Link]) -> Iterator[str]:
        """Other processes: the path at which JAX's client reaches the service inside this context."""
        with socket_file() as path, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            threading.Thread(target=self._accept, args=(listener, connect), name="relay listener", daemon=True).start()
            try:
                yield path
            finally:
                listener.shutdown(socket.SHUT_RDWR)  # ends `accept`

    def _accept(self, listener: socket.socket, connect: Callable[[], Link]) -> None:
        while True:
            try:
                local, _ = listener.accept()
            except OSError:
                return
            try:
                self._start(local, connect(), keep_open=True)
            except OSError:  # JAX's client will try again
                local.close()

    def _start(self, local: socket.socket, link: Link, keep_open: bool) -> None:
        def start() -> None:
            task = self._loop.create_task(_copy(local, link, keep_open))
            self._copies.add(task)
            task.add_done_callback(self._copies.discard)

        self._loop.call_soon_threadsafe(start)


async def _copy(local: socket.socket, link: Link, keep_open: bool) -> None:
    """Copies in both directions until either side ends; with `keep_open`, until the local side ends."""
    local_in, local_out = await asyncio.open_connection(sock=local)
    link_in, link_out = await asyncio.open_connection(sock=link.socket)
    outward = asyncio.create_task(_outward(local_in, link_out, link))
    inward = asyncio.create_task(_inward(link_in, local_out, link))
    await asyncio.wait([outward] if keep_open else [outward, inward], return_when=asyncio.FIRST_COMPLETED)
    for task in (outward, inward):
        task.cancel()
    for writer in (local_out, link_out):
        writer.close()


async def _outward(local: asyncio.StreamReader, link_out: asyncio.StreamWriter, link: Link) -> None:
    while data := await _read(local):
        if not link_out.is_closing():  # process 0 is dead
            await _write(link_out, link.codec.wrap(data))


async def _inward(link_in: asyncio.StreamReader, local: asyncio.StreamWriter, link: Link) -> None:
    contents, link.arrived = link.arrived, []
    while True:
        for content in contents:
            await _write(local, content)
        data = await _read(link_in)
        try:
            contents = link.codec.unwrap(data)
        except NotAuthenticated:
            return
        if not data or local.is_closing():
            return


async def _read(reader: asyncio.StreamReader) -> bytes:
    """The next bytes; none when there will be no more."""
    try:
        return await reader.read(BLOCK)
    except OSError:
        return b""


async def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(OSError):
        writer.write(data)
        await writer.drain()
