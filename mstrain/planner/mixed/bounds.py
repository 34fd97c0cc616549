"""The time of an iteration, and bounds of the search from below, compiled.

All in one file because numba's cache looks for changes only there. `least_totals` is an exact relaxation of the rest
of a pipeline, by dynamic programming: for every number of leading layers and every combination of devices left, the
least sum of stage times, when only stages are allowed that respect a limit on their own time and on their
end-of-iteration time. `child_costs` adds it to the `iteration_terms` of a tail, for every stage that may come before.
"""

import numba
import numpy as np


@numba.njit(cache=True)
def iteration_terms(microbatches, slowest, total, finish, generator_ms):
    """(steady, fill, end, batch generator): the parts of an iteration in ms, which add up to its time.

    It is that of a synchronous pipeline (1F1B or GPipe) whose stages all run every microbatch: `slowest` is the time of
    the slowest stage, `total` the sum over all stages and `generator_ms` that of the batch generator, each for one
    microbatch; `finish` is the longest gradient exchange and update of a stage.
    """
    return (microbatches - 1) * slowest, total, finish, microbatches * generator_ms


@numba.njit(cache=True)
def least_totals(stage_ms, end_ms, slowest, finish, group_of, offsets, contains, real):
    """Least sum of stage times of the first l layers on the devices of state s: (L + 1, S), or infinity.

    Also gives the ranges of `slowest` and `finish`, shrunk to the times that allowed stages really take.

    `stage_ms` (infinite where memory does not suffice) and `end_ms` are (L + 1, L + 1, C), of each choice
    for layers [begin, end); `slowest` and `finish` are the ranges of their greatest in a plan. `group_of`
    (C,) is the device group of a choice; groups come after those they contain. `offsets` (G,) is how far the
    state index falls when a group's devices are taken, `contains` (G, G) whether the first group has the
    devices of the second. `real` (S,) marks the states; taking devices that one lacks leads to none.
    """
    groups, layers, states = len(offsets), len(stage_ms) - 1, len(real)
    total = np.full((layers + 1, states), np.inf)
    total[0] = np.where(real, 0.0, np.inf)
    low, high = np.full(2, np.inf), np.full(2, -np.inf)
    best, useful = np.empty(groups), np.empty(groups, np.int64)
    for end in range(1, layers + 1):
        for begin in range(end):
            best[:] = np.inf
            for choice in range(len(group_of)):
                ms, last_ms = stage_ms[begin, end, choice], end_ms[begin, end, choice]
                if ms <= slowest[1] and last_ms <= finish[1] and ms < np.inf:
                    if ms >= slowest[0]:
                        low[0], high[0] = min(low[0], ms), max(high[0], ms)
                    if last_ms >= finish[0]:
                        low[1], high[1] = min(low[1], last_ms), max(high[1], last_ms)
                    best[group_of[choice]] = min(best[group_of[choice]], ms)
            count = 0
            for group in range(groups):
                if best[group] == np.inf:
                    continue
                needed = True
                for other in useful[:count]:  # devices may idle, so fewer that are as fast do
                    if best[other] <= best[group] and contains[group, other]:
                        needed = False
                        break
                if not needed:
                    continue
                useful[count] = group
                count += 1
                offset = offsets[group]
                lower(total[end, offset:], total[begin, : states - offset], best[group])
        for state in range(states):
            if not real[state]:
                total[end, state] = np.inf
    return total, (low[0], high[0]), (low[1], high[1])


@numba.njit(cache=True)
def lower(least, before, ms):
    """Lower each of `least` to the one of `before` plus `ms` where that is less, in place.

    One loop without a branch over all states, so that it is compiled to vector instructions.
    """
    for index in range(len(least)):
        candidate = before[index] + ms
        least[index] = candidate if candidate < least[index] else least[index]


@numba.njit(cache=True)
def child_costs(tables, box, tail, flight, microbatches, generator_ms):
    """Least ms of the plans in which a choice runs the layers [begin, tail's).

    (begin, C), infinite where the stage is not allowed. `tables` are `stage_ms` and `end_ms` as in `least_totals`,
    `flights` (L + 1, L + 1, C), the microbatches that fit in memory, `offsets` (C,) and `fits` (S, C) of choices; `box`
    is its total, and the ranges of its slowest stage and finish. `tail` is its first layer, the devices it leaves, and
    its slowest stage, sum and end; `flight` the microbatches in flight. The others are as in `iteration_terms`.
    """
    (stage_ms, end_ms, flights, offsets, fits), (total, slowest, finish) = tables, box
    end, state, tail_slowest, tail_total, tail_finish = tail
    costs = np.full((end, len(offsets)), np.inf)
    for begin in range(end):
        # A plan that begins here is complete; another one reaches the low ends of its box.
        least_slowest = max(tail_slowest, slowest[0]) if begin else tail_slowest
        least_finish = max(tail_finish, finish[0]) if begin else tail_finish
        for choice in range(len(offsets)):
            ms, last_ms = stage_ms[begin, end, choice], end_ms[begin, end, choice]
            if not fits[state, choice] or flights[begin, end, choice] < flight:
                continue
            if ms <= slowest[1] and last_ms <= finish[1]:
                longest, last = max(least_slowest, ms), max(least_finish, last_ms)
                rest = total[begin, state - offsets[choice]]
                steady, fill, final, data = iteration_terms(microbatches, longest, tail_total, last, generator_ms)
                costs[begin, choice] = steady + fill + ms + rest + final + data
    return costs
