"""An exact relaxation of the rest of a pipeline, by dynamic programming; it bounds the search from below.

For every number of leading layers and every combination of devices left: the least sum of stage times,
when only stages are allowed that respect a limit on their own time and on their end-of-iteration time.
"""

import numba
import numpy as np


@numba.njit(cache=True)
def least_totals(stage_ms, end_ms, possible, slowest, finish, group_of, offsets, fits, contains):
    """Least sum of stage times of the first l layers on the devices of state s: (L + 1, S), or infinity.

    Also gives the ranges of `slowest` and `finish`, shrunk to the times that allowed stages really take.

    `stage_ms`, `end_ms` and `possible` are (L + 1, L + 1, C), of each choice for layers [begin, end);
    `slowest` and `finish` are the ranges of their greatest in a plan. `group_of` (C,) is the device group
    of a choice, `offsets` (G,) how far the state index falls when a group's devices are taken, `fits` (G,
    S) whether a state has them, and `contains` (G, G) whether the first group has the devices of the
    second.
    """
    groups, layers, states = len(offsets), len(stage_ms) - 1, fits.shape[1]
    total = np.full((layers + 1, states), np.inf)
    total[0] = 0.0
    low, high = np.full(2, np.inf), np.full(2, -np.inf)
    for end in range(1, layers + 1):
        for begin in range(end):
            best = np.full(groups, np.inf)
            for choice in range(len(group_of)):
                ms, last_ms = stage_ms[begin, end, choice], end_ms[begin, end, choice]
                if possible[begin, end, choice] and ms <= slowest[1] and last_ms <= finish[1]:
                    if ms >= slowest[0]:
                        low[0], high[0] = min(low[0], ms), max(high[0], ms)
                    if last_ms >= finish[0]:
                        low[1], high[1] = min(low[1], last_ms), max(high[1], last_ms)
                    best[group_of[choice]] = min(best[group_of[choice]], ms)
            for group in range(groups):
                ms = best[group]
                if ms == np.inf:
                    continue
                useful = True
                for other in range(groups):  # devices may idle, so fewer that are as fast do
                    if best[other] <= ms and other != group and contains[group, other]:
                        useful = False
                        break
                if not useful:
                    continue
                offset = offsets[group]
                for state in range(offset, states):
                    if fits[group, state]:
                        total[end, state] = min(total[end, state], total[begin, state - offset] + ms)
    return total, (low[0], high[0]), (low[1], high[1])
