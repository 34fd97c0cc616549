"""Reads the links of a job in a thread of its own: messages, and deaths."""

import selectors
import threading
from collections.abc import Callable

from mstrain.job.link import Link, parse


def watch(
    links: dict[int, Link],
    heard: Callable[[int, dict], None],
    gone: Callable[[int], None],
    dropped: Callable[[int, Exception], None],
) -> threading.Thread:
    """Reads all `links` in a thread of its own: `heard(process, message)` and, once for each, `gone(process)`.

    A message that is malformed, or with which `heard` fails, is reported to `dropped(process, error)`.
    """
    selector = selectors.DefaultSelector()
    for process, link in links.items():
        selector.register(link.socket, selectors.EVENT_READ, (process, link))

    def deliver(process: int, contents: list[bytes]) -> None:
        for content in contents:
            try:
                heard(process, parse(content))
            except Exception as error:  # whatever a peer sends must not end this thread
                dropped(process, error)

    def read() -> None:
        for key, _ in selector.select():
            process, link = key.data
            contents = link.receive()
            deliver(process, contents or [])
            if contents is None:
                selector.unregister(link.socket)
                gone(process)

    def read_all() -> None:
        try:
            for process, link in links.items():
                deliver(process, link.arrived)
            while selector.get_map():
                read()
        finally:  # without its reader, a peer's death would not be noticed
            for key in list(selector.get_map().values()):
                gone(key.data[0])

    thread = threading.Thread(target=read_all, name="rendezvous", daemon=True)
    thread.start()
    return thread
