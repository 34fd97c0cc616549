"""The time of an iteration and lower bounds of the search, compiled with numba.

The functions are in one file because numba's cache detects changes only in the file of the compiled function.
`least_totals` computes, by dynamic programming, an exact relaxation of the remaining head of a pipeline: for every
number of leading layers and every combination of remaining devices, the least sum of stage times, over stages whose own
time and end-of-iteration time are within limits. `child_costs` combines it with the `iteration_terms` of a tail, for
every stage that may precede the tail.
"""

import numba
import numpy as np


@numba.njit(cache=True)
def iteration_terms(microbatches, slowest, total, finish, generator_ms):
    """(steady state, fill, end, batch generator): terms of an iteration in ms, which add up to its time.

    The iteration is that of a synchronous pipeline (1F1B or GPipe) in which every stage runs every microbatch. All
    times are in ms. For one microbatch, `slowest` is the time of the slowest stage, `total` the sum over all stages and
    `generator_ms` that of the batch generator on the first stage. `finish` is the longest gradient exchange and update
    of a stage.
    """
    return (microbatches - 1) * slowest, total, finish, microbatches * generator_ms


@numba.njit(cache=True)
def least_totals(stage_ms, end_ms, slowest, finish, group_of, offsets, contains, real):
    """Least sums of stage times, for L layers, C choices of a stage, G device groups and S states.

    Args:
      stage_ms: (L + 1, L + 1, C) ms of a stage with layers [begin, end); infinite if memory does not suffice.
      end_ms: (L + 1, L + 1, C) ms of its gradient exchange and update.
      slowest, finish: (low, high) limits of the largest `stage_ms` and `end_ms` in a plan.
      group_of: (C,) device group of each choice; a group has a larger number than the groups that it contains.
      offsets: (G,) difference of the state index when the devices of a group are taken.
      contains: (G, G) whether the first group has the devices of the second.
      real: (S,) whether an index is that of a state; taking devices that a state lacks leads to an index that is not.

    Returns:
      (L + 1, S) the least sum of stage times of the first l layers on the devices of state s, or infinity, and the
      ranges `slowest` and `finish`, shrunk to times that allowed stages take.
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
                for other in useful[:count]:  # devices may idle, so a contained group that is as fast is sufficient
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
    """Sets `least` to the elementwise minimum of `least` and `before + ms`, in place.

    The loop over all states has no branch, so that it compiles to vector instructions.
    """
    for index in range(len(least)):
        candidate = before[index] + ms
        least[index] = candidate if candidate < least[index] else least[index]


@numba.njit(cache=True)
def child_costs(tables, box, tail, flight, microbatches, generators):
    """Lower bounds, in ms, of plans in which a choice runs layers from `begin` to the first layer of a tail.

    Args:
      tables: `stage_ms` and `end_ms` as in `least_totals`; (L + 1, L + 1, C) microbatches that fit in memory; (C,)
        `offsets` and (S, C) `fits` of the choices.
      box: the result of `least_totals`, and the ranges of the slowest stage and of the finish.
      tail: first layer of the tail, state of the remaining devices, its slowest stage, sum of stages and finish (ms).
      flight: number of microbatches in flight in the new stage.
      microbatches: as in `iteration_terms`.
      generators: (C,) `generator_ms` of an iteration whose first stage is the choice.

    Returns:
      (first layer of the tail, C) bounds by `begin` and choice, infinite if the stage is not allowed.
    """
    (stage_ms, end_ms, flights, offsets, fits), (total, slowest, finish) = tables, box
    end, state, tail_slowest, tail_total, tail_finish = tail
    costs = np.full((end, len(offsets)), np.inf)
    least_generator = generators.min()
    for begin in range(end):
        # With begin = 0 the plan is complete. Otherwise its largest times are at least the low ends of the box.
        least_slowest = max(tail_slowest, slowest[0]) if begin else tail_slowest
        least_finish = max(tail_finish, finish[0]) if begin else tail_finish
        for choice in range(len(offsets)):
            ms, last_ms = stage_ms[begin, end, choice], end_ms[begin, end, choice]
            if not fits[state, choice] or flights[begin, end, choice] < flight:
                continue
            if ms <= slowest[1] and last_ms <= finish[1]:
                longest, last = max(least_slowest, ms), max(least_finish, last_ms)
                rest = total[begin, state - offsets[choice]]
                generator_ms = least_generator if begin else generators[choice]
                steady, fill, final, data = iteration_terms(microbatches, longest, tail_total, last, generator_ms)
                costs[begin, choice] = steady + fill + ms + rest + final + data
    return costs
