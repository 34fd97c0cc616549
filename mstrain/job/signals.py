"""The signals that stop a job."""

import contextlib
import signal
from collections.abc import Callable, Iterator

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def to_handle() -> list[signal.Signals]:
    """SIGNALS, without SIGHUP where it is ignored (nohup)."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in SIGNALS if not (number == signal.SIGHUP and ignored)]


@contextlib.contextmanager
def handled(act: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Inside, the main thread calls `act` with each of SIGNALS that arrives."""
    handlers = {number: signal.signal(number, lambda found, _: act(signal.Signals(found))) for number in to_handle()}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
