"""The compiled loop of the simulator: lanes keep to program order, or serve first come, first served.

It takes `Ragged` lists per operation: the lanes that it holds, with `seconds` for each (NaN for no event), the values
that it reads (`inputs`) and writes (`outputs`); and the numbers of lanes, of values and of the first lanes that keep to
program order. It returns the start and end of every operation and the end of every lane, in seconds.
"""

import heapq

import numba
import numpy as np


@numba.njit(cache=True)
def _dependencies(held, inputs, outputs, num_ordered, num_values):
    """How many things every operation waits for, the next operation per event, and the readers per value in lists.

    An operation waits for the writers of its inputs, and on the first `num_ordered` lanes for the one before it.
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
    """Lanes serve operations as they become ready; the first `num_ordered` lanes keep to program order."""
    pending, after, reader_offsets, readers = _dependencies(held, inputs, outputs, num_ordered, num_values)
    (offsets, lanes), (out_offsets, out_items) = held, outputs
    free, ready = np.zeros(num_lanes), np.zeros(len(pending))
    starts, ends = np.full(len(pending), np.nan), np.full(len(pending), np.nan)
    queue = [(0.0, op) for op in range(len(pending)) if pending[op] == 0]  # sorted, so a heap
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
