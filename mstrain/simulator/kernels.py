"""The compiled loop of the simulator: lanes keep to program order, or serve first come, first served.

It takes events in lists per operation (`offsets`, and per event a lane and its seconds, NaN for no event), the values
read and written in lists per operation, and the numbers of lanes, of values and of the first lanes that keep to program
order. It returns the start and end of every operation and the end of every lane, in seconds.
"""

from __future__ import annotations

import numba
import numpy as np


@numba.njit(cache=True)
def _hold(op, start, offsets, lanes, seconds, free):
    """Let `op` hold its lanes from `start`; returns when the last of its events is over."""
    end = start
    for event in range(offsets[op], offsets[op + 1]):
        until = start if np.isnan(seconds[event]) else start + seconds[event]
        free[lanes[event]] = until
        end = max(end, until)
    return end


@numba.njit(cache=True)
def _push(times, ops, size, time, op):
    """Add (time, op) to a binary heap of `size` entries; the earliest is on top, ties by number."""
    at = size
    while at:
        above = (at - 1) // 2
        if times[above] < time or (times[above] == time and ops[above] < op):
            break
        times[at], ops[at] = times[above], ops[above]
        at = above
    times[at], ops[at] = time, op


@numba.njit(cache=True)
def _pop(times, ops, size):
    """Remove the top of a heap of `size` entries."""
    time, op, at = times[size - 1], ops[size - 1], 0
    while 2 * at + 1 < size - 1:
        below = 2 * at + 1
        other = below + 1
        if other < size - 1 and (
            times[other] < times[below] or (times[other] == times[below] and ops[other] < ops[below])
        ):
            below = other
        if time < times[below] or (time == times[below] and op < ops[below]):
            break
        times[at], ops[at] = times[below], ops[below]
        at = below
    times[at], ops[at] = time, op


@numba.njit(cache=True)
def _waiting(offsets, lanes, in_offsets, in_items, out_items, num_ordered, num_values):
    """What every operation waits for: (how many things, next operation per event, readers per value in
    lists).

    An operation waits for the writers of its inputs, and on the first `num_ordered` lanes for the one before
    it.
    """
    pending = np.zeros(len(offsets) - 1, np.int64)
    after, last = np.full(len(lanes), -1), np.full(num_ordered, -1)
    written = np.zeros(num_values, np.bool_)
    written[out_items] = True
    reader_offsets = np.zeros(num_values + 1, np.int64)
    for value in in_items:
        reader_offsets[value + 1] += 1
    reader_offsets = np.cumsum(reader_offsets)
    readers, filled = np.empty(len(in_items), np.int64), reader_offsets.copy()
    for op in range(len(pending)):
        for entry in range(in_offsets[op], in_offsets[op + 1]):
            value = in_items[entry]
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
def _release(op, time, pending, ready, times, ops, size):
    """One thing `op` waits for is there at `time`; returns the size of the heap, `op` added if ready."""
    ready[op] = max(ready[op], time)
    pending[op] -= 1
    if pending[op]:
        return size
    _push(times, ops, size, ready[op], op)
    return size + 1


@numba.njit(cache=True)
def first_come(
    offsets, lanes, seconds, in_offsets, in_items, out_offsets, out_items, num_lanes, num_values, num_ordered
):
    """Lanes serve operations as they become ready; the first `num_ordered` lanes keep to program order."""
    pending, after, reader_offsets, readers = _waiting(
        offsets, lanes, in_offsets, in_items, out_items, num_ordered, num_values
    )
    free, ready = np.zeros(num_lanes), np.zeros(len(pending))
    starts, ends = np.full(len(pending), np.nan), np.full(len(pending), np.nan)
    times, ops, size = np.empty(len(pending)), np.empty(len(pending), np.int64), 0
    for op in range(len(pending)):
        if pending[op] == 0:
            _push(times, ops, size, 0.0, op)
            size += 1
    while size:
        start, op = times[0], ops[0]
        _pop(times, ops, size)
        size -= 1
        for event in range(offsets[op], offsets[op + 1]):
            start = max(start, free[lanes[event]])
        starts[op] = start
        ends[op] = _hold(op, start, offsets, lanes, seconds, free)
        for entry in range(out_offsets[op], out_offsets[op + 1]):
            value = out_items[entry]
            for index in range(reader_offsets[value], reader_offsets[value + 1]):
                size = _release(readers[index], ends[op], pending, ready, times, ops, size)
        for event in range(offsets[op], offsets[op + 1]):
            if after[event] >= 0:
                size = _release(after[event], free[lanes[event]], pending, ready, times, ops, size)
    return starts, ends, free
