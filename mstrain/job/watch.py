"""Reads messages and closed connections from the links of a job in a thread."""

import selectors
import threading
from collections.abc import Callable

from mstrain.job.link import Link, parse


def watch(
    links: dict[int, Link],
    on_message: Callable[[int, dict], None],
    on_closed: Callable[[int], None],
    on_error: Callable[[int, Exception], None],
) -> threading.Thread:
    """Starts a thread that reads all `links`: calls `on_message(process, message)` and, once per link,
    `on_closed(process)`.

    It calls `on_error(process, error)` for a malformed message and when `on_message` raises.
    """
    selector = selectors.DefaultSelector()
    for process, link in links.items():
        selector.register(link.socket, selectors.EVENT_READ, (process, link))

    def deliver(process: int, contents: list[bytes]) -> None:
        for content in contents:
            try:
                on_message(process, parse(content))
            except Exception as error:  # no message may end this thread
                on_error(process, error)

    def read() -> None:
        for key, _ in selector.select():
            process, link = key.data
            contents = link.receive()
            deliver(process, contents or [])
            if contents is None:
                selector.unregister(link.socket)
                on_closed(process)

    def read_all() -> None:
        try:
            for process, link in links.items():
                deliver(process, link.arrived)
            while selector.get_map():
                read()
        finally:  # without this thread, the death of a peer would stay undetected
            for key in list(selector.get_map().values()):
                on_closed(key.data[0])

    thread = threading.Thread(target=read_all, name="rendezvous", daemon=True)
    thread.start()
    return thread
