"""The event loop of the simulator, compiled by numba.

An operation starts when its inputs exist and all its lanes are free, and then holds these lanes. A lane is the compute
unit of a device or one direction of a link.
"""

import heapq

import numba
import numpy as np


@numba.njit(cache=True)
def _dependencies(held, inputs, outputs, num_ordered, num_values):
    """What every operation waits for; an event is an operation on one of its lanes. Arguments as in `first_come`.

    Returns:
      pending: int array of shape (operations,): on how many inputs and earlier operations of ordered lanes each waits.
      after: int array of shape (events,): the next operation on the same ordered lane; -1 for none and on other lanes.
      reader_offsets, readers: the operations that read value v are `readers[reader_offsets[v]:reader_offsets[v + 1]]`.
    """
    (offsets, lanes), (in_offsets, in_items) = held, inputs
    pending = np.zeros(len(offsets) - 1, np.int64)
    after, last = np.full(len(lanes), -1), np.full(num_ordered, -1)
    written = np.zeros(num_values, np.bool_)
    written[outputs.items] = True
    reader_offsets = np.zeros(num_values + 1, np.int64)
    reader_offsets[1:] = np.cumsum(np.bincount(in_items, minlength=num_values))
    readers, filled = np.empty(len(in_items), np.int64), reader_offsets.copy()
    for op in range(len(pending)):
        for value in in_items[in_offsets[op] : in_offsets[op + 1]]:
            readers[filled[value]] = op
            filled[value] += 1
            pending[op] += written[value]
        for event in range(offsets[op], offsets[op + 1]):
            if lanes[event] < num_ordered:
                if last[lanes[event]] >= 0:
                    after[last[lanes[event]]] = op
                    pending[op] += 1
                last[lanes[event]] = event
    return pending, after, reader_offsets, readers


@numba.njit(cache=True)
def _release(op, time, pending, ready, queue):
    ready[op], pending[op] = max(ready[op], time), pending[op] - 1
    if pending[op] == 0:
        heapq.heappush(queue, (ready[op], op))


@numba.njit(cache=True)
def first_come(held, seconds, inputs, outputs, num_lanes, num_values, num_ordered):
    """Runs all operations.

    Args:
      held: `Ragged`, the lanes that each operation holds.
      seconds: float array of shape (events,), how long each of these lanes is held; NaN for no event.
      inputs, outputs: `Ragged`, the values that each operation reads and writes.
      num_ordered: the first `num_ordered` lanes run operations in program order; other lanes run them in the order in
        which they become ready.

    Returns:
      Start and end of every operation (NaN if it waits forever) and end of every lane, float arrays in seconds.
    """
    pending, after, reader_offsets, readers = _dependencies(held, inputs, outputs, num_ordered, num_values)
    (offsets, lanes), (out_offsets, out_items) = held, outputs
    free, ready = np.zeros(num_lanes), np.zeros(len(pending))
    starts, ends = np.full(len(pending), np.nan), np.full(len(pending), np.nan)
    queue = [(0.0, op) for op in range(len(pending)) if pending[op] == 0]  # a sorted list is a heap
    while len(queue):
        start, op = heapq.heappop(queue)
        for lane in lanes[offsets[op] : offsets[op + 1]]:
            start = max(start, free[lane])
        starts[op] = ends[op] = start
        for event in range(offsets[op], offsets[op + 1]):
            until = start if np.isnan(seconds[event]) else start + seconds[event]
            free[lanes[event]] = until
            ends[op] = max(ends[op], until)
        for value in out_items[out_offsets[op] : out_offsets[op + 1]]:
            for reader in readers[reader_offsets[value] : reader_offsets[value + 1]]:
                _release(reader, ends[op], pending, ready, queue)
        for event in range(offsets[op], offsets[op + 1]):
            if after[event] >= 0:
                _release(after[event], free[lanes[event]], pending, ready, queue)
    return starts, ends, free
