"""Orbax's handler of trees of arrays, extended by checksums of the files and a time limit.

Orbax waits for the futures of `async_save` in a thread, before the barrier of all processes and the commit. Every
process computes the checksums of its own files there, in parallel with the others and with training.
"""

import time
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from mstrain.checkpoints import manifest

# Orbax divides an array among the devices that have copies of it by a program for each device. Smaller parts than these
# bytes take longer to compile than to write.
LEAST_PART = 2**20


class DigestingHandler(ocp.PyTreeCheckpointHandler):
    """Reads with `buffer` bytes per host beside the arrays.

    `limit` is the seconds for the next save; `speed` the bytes per second of the last one, None before it.
    """

    def __init__(self, buffer: int | None = None):
        # Compression saves 8 % of float32 arrays and doubles the time to read them.
        arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=LEAST_PART)
        super().__init__(
            use_compression=False, restore_concurrent_gb=_gigabytes(buffer),
            type_handler_registry=ocp.type_handlers.create_type_handler_registry((jax.Array, arrays)),
        )  # fmt: skip
        self.limit = 0.0
        self.speed: float | None = None

    async def async_save(self, directory: epath.Path, *args, **kwargs) -> list:
        """Starts writing; the future it returns also digests, and raises TimeoutError after the limit."""
        begun = time.perf_counter()
        futures = await super().async_save(directory, *args, **kwargs)
        return [_Part(self, directory, futures or [], begun)]


def _gigabytes(size: int | None) -> Any:
    """Typed Any, because Orbax annotates an int but also takes fractions."""
    return None if size is None else size / 10**9


@ocp.args.register_with_handler(DigestingHandler, for_save=True)
class Save(ocp.args.PyTreeSave):
    """A tree to save with `DigestingHandler`."""


@ocp.args.register_with_handler(DigestingHandler, for_restore=True)
class Restore(ocp.args.PyTreeRestore):
    """What to restore with `DigestingHandler`."""


class _Part:
    """The future of what this process writes and digests."""

    def __init__(self, handler: DigestingHandler, directory: epath.Path, futures: list, begun: float):
        self._handler, self._directory, self._futures, self._begun = handler, directory, futures, begun
        self._limit = handler.limit

    def result(self, timeout: float | None = None) -> None:
        """Returns when all is written; the limit replaces Orbax's `timeout`, which does not depend on the size."""
        del timeout
        for future in self._futures:
            left = self._limit - (time.perf_counter() - self._begun)
            try:
                future.result(timeout=max(left, 1e-3))
            except TimeoutError as error:
                raise TimeoutError(f"this host's part was not written within {self._limit:.0f} s") from error
        write_seconds = time.perf_counter() - self._begun
        record = {"write_seconds": round(write_seconds, 3), "limit_seconds": round(self._limit, 1)}
        size = manifest.write_part(self._directory, jax.process_index(), record)
        self._handler.speed = size / (time.perf_counter() - self._begun)

    def cancel(self) -> None:
        for future in self._futures:
            future.cancel()
