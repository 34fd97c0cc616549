"""The search within one inter-stage plan of Metis, compiled by numba: walk, layer balancer, memory check and cost.

It is one file because numba's cache detects changes of the file of a function only. Loops over stages compile faster
than operations on arrays. Sums run left to right in float64, as in the reference: another order may change which plans
tie. Names: `row`, index of a profile; `demand`, memory of the layers of a stage, and `left`, its capacity minus that
(MB); `share`, a fraction of the total speed; `work`, (missing profile, type and samples of each replica).
"""

import numba
import numpy as np

CUTS = 7  # sub-layers of a layer in the balancer
MAX_ATTEMPTS = 3  # layer partitions tried per strategy
MEMORY_FACTOR = 5.0  # memory that the reference assumes, over the profiled memory
SHRINK = 0.9  # factor on the share of a stage that does not fit
ADJUST_PASSES = 10_000  # at most; the reference has no limit and may not end
BYTES_PER_MS = 1024.0 * 1024.0  # of 1 GB/s, as the reference counts


@numba.njit(cache=True)
def profile_row(rows, missing, kind, tp, batch):
    """Index of a profile. If it is missing, writes its key to `missing` and returns -1, the index of a row of NaN."""
    row = rows[kind, tp, batch] if tp < rows.shape[1] and batch < rows.shape[2] else -1
    if row < 0:
        missing[0], missing[1], missing[2] = kind, tp, batch
    return row


@numba.njit(cache=True)
def range_sum(table, row, begin, end):
    total = 0.0
    for layer in range(begin, end):
        total += table[row, layer]
    return total


@numba.njit(cache=True)
def split_batch(t, types, ranks, dp, tp, samples, work):
    """Divides `samples` among the replicas of `ranks` (begin, end) by the speed of the type of their first device."""
    (begin, end), (missing, kinds, shares) = ranks, work
    fraction, total = np.empty(dp), 0.0
    for i in range(dp):
        kinds[i] = types[begin + i * ((end - begin) // dp)]
        fraction[i] = 1.0 / t.total_ms[profile_row(t.row, missing, kinds[i], tp, 1)]
        total += fraction[i]
    if np.isnan(total):
        return False
    left = samples
    for i in range(dp):
        exact = samples * (fraction[i] / total)
        shares[i] = int(np.floor(exact))
        fraction[i] = exact - shares[i]
        left -= shares[i]
    while left > 0:  # replicas of one type are neighbors with equal fractions, and take the remainder in turn
        i = int(np.argmax(fraction))
        kind = kinds[i]
        while left > 0 and i < dp and kinds[i] == kind:
            shares[i] += 1
            fraction[i] = -1.0
            left -= 1
            i += 1
    return True


@numba.njit(cache=True)
def compute_ms(t, types, ranks, dp, layers, samples, max_bit, work):
    """Ms of `layers` on `ranks`; NaN without a profile. Replicas of several types run powers of two in sequence."""
    (begin, end), (layer, next_layer), (missing, kinds, shares) = ranks, layers, work
    tp = (end - begin) // dp
    if types[begin] == types[end - 1]:
        row = profile_row(t.row, missing, types[begin], tp, samples // dp)
        return range_sum(t.layer_ms, row, layer, next_layer)
    if not split_batch(t, types, ranks, dp, tp, samples, work):
        return np.nan
    slowest = 0.0
    for i in range(dp):
        if i > 0 and kinds[i] == kinds[i - 1] and shares[i] == shares[i - 1]:
            continue
        replica_ms = 0.0
        for power in range(62, -1, -1):
            if shares[i] & (1 << power):
                row = profile_row(t.row, missing, kinds[i], tp, 1 << power) if 1 << power <= max_bit else -1
                replica_ms += range_sum(t.layer_ms, row, layer, next_layer)
        slowest = np.maximum(slowest, replica_ms)
    return slowest


@numba.njit(cache=True)
def stage_speeds(t, types, starts, dp, batches, work, speed):
    """Writes the speed of every stage for the whole model, normalized to sum 1; False without a profile."""
    total, samples = 0.0, t.gbs // batches
    for i in range(len(dp)):
        ms = compute_ms(t, types, (starts[i], starts[i + 1]), dp[i], (0, len(t.weight)), samples, t.gbs, work)
        speed[i] = 0.0 if ms == 0.0 else 1.0 / ms
        total += speed[i]
    speed /= total
    return not np.isnan(total)


@numba.njit(cache=True)
def stage_demands(t, types, starts, dp, bounds, batches, work, demand):
    """Writes the MB that the reference assumes: of one replica, by profiles of the first type. False without a profile.

    The reference divides the batch of a stage of several types over the whole cluster.
    """
    samples, kind, (missing, _, shares) = t.gbs // batches, types[0], work
    for i in range(len(dp)):
        tp, begin, end = (starts[i + 1] - starts[i]) // dp[i], bounds[i], bounds[i + 1]
        demand[i] = 0.001
        if types[starts[i]] == types[starts[i + 1] - 1]:
            row = profile_row(t.row, missing, kind, tp, samples // dp[i])
            demand[i] += MEMORY_FACTOR * range_sum(t.layer_mb, row, begin, end)
            continue
        if not split_batch(t, types, (0, len(types)), dp[i], tp, samples, work):
            return False
        by_power = np.full(63, -1.0)
        for replica in range(dp[i]):
            for power in range(62, -1, -1):
                if shares[replica] & (1 << power):
                    if by_power[power] == -1.0:
                        row = profile_row(t.row, missing, kind, tp, 1 << power)
                        by_power[power] = MEMORY_FACTOR * range_sum(t.layer_mb, row, begin, end)
                    demand[i] += by_power[power]
    return not np.isnan(demand.sum())


@numba.njit(cache=True)
def spread_sub_layers(weight, capacity, owner, remaining):
    """Assigns sub-layers to stages in order, up to their capacity, the last stage from the end; then fills gaps."""
    stages, end = len(capacity), len(owner)
    owner[:] = -1
    for i in range(stages):
        remaining[i] = capacity[i]
    k, last, held, lowest = 0, stages - 1, 0, end
    for i in range(last):
        while k <= end - CUTS - 2:
            unit = weight[k // CUTS] / CUTS
            k += 1
            if not remaining[i] > unit:
                break
            owner[k - 1] = i
            remaining[i] -= unit
    for q in range(end - 1, -1, -1):
        if owner[q] >= 0:
            continue
        unit = weight[q // CUTS] / CUTS
        if held >= CUTS and not (q + 1 == lowest and remaining[last] > unit):
            break
        owner[q], held, lowest = last, held + 1, q
        remaining[last] -= unit
    fill_gaps(weight, owner, remaining)


@numba.njit(cache=True)
def fill_gaps(weight, owner, remaining):
    """Assigns each other sub-layer to the stage, from that below to that above it, with the most capacity left."""
    stages, end = len(remaining), len(owner)
    smallest, largest = np.full(stages, end), np.full(stages, -1)
    for q in range(end):
        if owner[q] >= 0:
            smallest[owner[q]], largest[owner[q]] = min(smallest[owner[q]], q), q
    for q in range(end):
        if owner[q] >= 0:
            continue
        low, high = 0, stages - 1
        below, above = -1, end
        for i in range(stages):
            if below < largest[i] < q:
                low, below = i, largest[i]
            if q < smallest[i] < above:
                high, above = i, smallest[i]
        best = low
        for i in range(low + 1, high + 1):
            best = i if remaining[i] > remaining[best] else best
        owner[q] = best
        remaining[best] -= weight[q // CUTS] / CUTS
        smallest[best], largest[best] = min(smallest[best], q), max(largest[best], q)


@numba.njit(cache=True)
def balance(weight, capacity, owner, remaining, keeper, bounds):
    """Writes the bounds of stages. A layer of which no stage has more than half is lost; stages may be empty."""
    stages, layers = len(capacity), len(weight)
    spread_sub_layers(weight, capacity, owner, remaining)
    held, kept = np.zeros((layers, stages), np.int64), np.zeros(stages, np.int64)
    first, last = np.full(stages, layers), np.full(stages, -1)
    for q in range(len(owner)):
        held[q // CUTS, owner[q]] += 1
    for layer in range(layers):
        stage = int(np.argmax(held[layer]))
        keeper[layer] = stage if 2 * held[layer, stage] > CUTS else -1
        if keeper[layer] == stage:
            kept[stage] += 1
            first[stage], last[stage] = min(first[stage], layer), layer
    slack, one_row = capacity.copy(), weight.reshape(1, layers)
    for i in range(stages):
        slack[i] -= range_sum(one_row, 0, first[i], last[i] + 1)
    shift_layers(weight, keeper, kept, slack)
    for i in range(stages):
        bounds[i + 1] = bounds[i] + kept[i]


@numba.njit(cache=True)
def shift_layers(weight, keeper, kept, slack):
    """Moves a layer to the stage with the most slack, up to three times while the largest slack does not grow."""
    stages, layers = len(kept), len(weight)
    for _ in range(3 if stages > 1 else 0):
        most = int(np.argmax(slack))
        above = most == 0 or (most < stages - 1 and slack[most + 1] < slack[most - 1])
        giver = most + 1 if above else most - 1
        if kept[giver] <= 1:
            return
        moved = -1
        for layer in range(layers):
            if keeper[layer] == giver and not (above and moved >= 0):
                moved = layer
        before = slack[most]
        slack[most], slack[giver] = slack[most] - weight[moved], slack[giver] + weight[moved]
        if slack.max() > before:
            return
        keeper[moved] = most
        kept[giver], kept[most] = kept[giver] - 1, kept[most] + 1


@numba.njit(cache=True)
def adjust_capacities(share, capacity, demand):
    """Moves share from stages without enough memory to stages with unused memory; False if this does not suffice."""
    stages = len(share)
    kept, spare, extra = np.empty(stages), np.empty(stages), np.zeros(stages)
    missing = to_spare = 0.0
    for i in range(stages):
        enough = capacity[i] > demand[i]
        kept[i] = share[i] if enough else share[i] * (capacity[i] / demand[i]) * SHRINK
        spare[i] = share[i] * capacity[i] / demand[i] - share[i] if enough else 0.0
        missing, to_spare = missing + (share[i] - kept[i]), to_spare + spare[i]
    if to_spare < missing:
        return False
    for _ in range(ADJUST_PASSES):
        if not missing > 0.01:
            for i in range(stages):
                share[i] = extra[i] + kept[i]
            return True
        total = 0.0
        for i in range(stages):
            total += share[i] if spare[i] > 0.001 else 0.0
        for i in range(stages):
            part = min(missing * (share[i] / total), spare[i]) if spare[i] > 0.001 else 0.0
            extra[i], spare[i], missing = extra[i] + part, spare[i] - part, missing - part
    return False


@numba.njit(cache=True)
def fit(t, types, starts, dp, batches, share, work, scratch, found):
    """The number of the first layer partition that fits; minus the number tried if none does, 0 without a profile."""
    (owner, remaining, keeper, capacity, demand), (bounds, left, first_left) = scratch, found
    for attempt in range(1, MAX_ATTEMPTS + 1):
        balance(t.weight, share, owner, remaining, keeper, bounds)
        if not stage_demands(t, types, starts, dp, bounds, batches, work, demand):
            return 0
        fits = True
        for i in range(len(dp)):
            left[i] = capacity[i] - demand[i]
            fits = fits and left[i] >= 0.0
            if attempt == 1:
                first_left[i] = left[i]
        if fits:
            return attempt
        if not adjust_capacities(share, capacity, demand):
            return -attempt
    return -MAX_ATTEMPTS


@numba.njit(cache=True)
def bandwidth(rank_node, node_intra, node_least, begin, end, stride):
    """GB/s that the reference assumes between every `stride`-th rank from `begin` to `end`."""
    node = rank_node[begin]
    one_node, least = True, node_least[node]
    for rank in range(begin, end, stride):
        other = rank_node[rank]
        one_node = one_node and other == node
        least = min(least, node_least[other])
    return node_intra[node] if one_node else least


@numba.njit(cache=True)
def plan_cost(t, layout, starts, num_stage, batches, dp, bounds, work):
    """Milliseconds per step of the first `num_stage` stages; NaN without a profile."""
    types, nodes, intra, least = layout
    samples, layers = t.gbs // batches, len(t.weight)
    embedding, middle, output = t.parameters[0], t.parameters[1], t.parameters[2]
    slowest = total = sync = update = p2p = 0.0
    data_parallel = -np.inf
    for i in range(num_stage):
        begin, end = bounds[i], bounds[i + 1]
        tp = (starts[i + 1] - starts[i]) // dp[i]
        micro = samples // dp[i]
        ms = compute_ms(t, types, (starts[i], starts[i + 1]), dp[i], (begin, end), samples, t.max_batch, work)
        slowest = max(slowest, ms)
        total += ms
        if i == num_stage - 1:
            sync = -np.inf
            for rank in range(starts[i], starts[i + 1]):
                sync = np.maximum(sync, t.sync_ms[profile_row(t.row, work[0], types[rank], tp, micro)])
        else:
            elements = micro * t.sequence * (t.vocab / tp if end == layers - 1 else t.hidden)
            p2p += elements / (bandwidth(nodes, intra, least, starts[i], starts[i + 2], 1) * BYTES_PER_MS)
        ring = np.inf
        for j in range(dp[i]):
            ring = min(ring, bandwidth(nodes, intra, least, starts[i] + j, starts[i + 1], dp[i]))
        first, last = begin == 0, end == layers
        held = middle / tp * (end - begin - first - last)
        held += embedding / tp if first else 0.0
        held += output / tp if last else 0.0
        data_parallel = max(data_parallel, 2 * (dp[i] - 1) / (dp[i] * (ring * BYTES_PER_MS)) * held)
        update = max(update, t.optimizer_ms / tp * ((end - begin) / layers))
    steps = ((batches - 1) * slowest + total) + batches * sync
    return steps + update + data_parallel + p2p + t.batch_generator_ms * batches


@numba.njit(cache=True)
def is_valid(samples, max_batch, max_tp, groups, dp):
    """Whether each replica has 1 to `max_batch` samples (rounded down), and tp is at most `max_tp`."""
    return ((dp <= samples) & (dp * (max_batch + 1) > samples) & (groups <= max_tp * dp)).all()


@numba.njit(cache=True)
def stage_to_split(dp, key):
    """The stage with several replicas and the smallest key (without keys, the most replicas); -1 if there is none."""
    best = -1
    for i in range(len(dp)):
        if dp[i] != 1 and (best < 0 or (key[i] < key[best] if len(key) else dp[i] > dp[best])):
            best = i
    return best


@numba.njit(cache=True)
def walk(t, layout, groups, num_stage, batches, use_strat, number, plans, found):
    """Walk number `number`: halves dp and doubles tp of one stage at a time until the first layer partition fits.

    Writes plans to `found` from row `plans` on. Returns (rows of `found` in use, steps counted). A missing profile ends
    the walk; `found.missing` then has its key.
    """
    types, missing, layers, stages = layout.rank_type, found.missing, len(t.weight), len(groups)
    starts, capacity = np.zeros(stages + 1, np.int64), np.zeros(stages)
    for i in range(stages):
        starts[i + 1] = starts[i] + groups[i]
        for rank in range(starts[i], starts[i + 1]):
            capacity[i] += t.memory_mb[types[rank]]
    work = missing, np.empty(len(types), np.int64), np.empty(len(types), np.int64)
    owner, keeper = np.empty(CUTS * layers, np.int64), np.empty(layers, np.int64)
    scratch = (owner, np.empty(stages), keeper, capacity, np.empty(stages))
    bounds, share = np.zeros(stages + 1, np.int64), np.empty(stages)
    left, first_left = np.empty(stages), np.empty(stages)
    key = no_key = np.empty(0)
    dp = groups.copy()
    steps = pending = 0
    while True:
        if is_valid(t.gbs // batches, t.max_batch, t.max_tp, groups, dp):
            if not stage_speeds(t, types, starts, dp, batches, work, share):
                break
            attempt = fit(t, types, starts, dp, batches, share, work, scratch, (bounds, left, first_left))
            if attempt == 0:
                break
            pending += attempt - 1 if attempt > 0 else -attempt
            key = first_left if use_strat else (left if attempt > 0 else no_key)
            if attempt > 0:
                steps, pending = steps + pending, 0
                found.walk[plans], found.attempt[plans] = number, attempt
                for i in range(stages):
                    found.dp[plans, i], found.bounds[plans, i + 1] = dp[i], bounds[i + 1]
                found.cost[plans] = plan_cost(t, layout, starts, num_stage, batches, dp, bounds, work)
                missing[0] = -1
                plans += 1
            if attempt == 1:
                break
        stage = stage_to_split(dp, key)
        if stage < 0:
            break
        dp[stage] //= 2
        pending += 1
    return plans, steps


@numba.njit(cache=True)
def walk_all(t, layout, groups, num_stage, batch_counts, use_strat, limits, found):
    """Walks of every group with every number of microbatches.

    `limits` are the first walk, the largest number of walks, and the largest number of plans of a walk. Returns (the
    next walk, plans found, steps counted). Ends early if `found` could be too small or a profile is missing.
    """
    number, most_walks, most_plans = limits
    plans = steps = np.int64(0)  # a literal 0 would compile `walk` twice
    end = min(number + most_walks, len(groups) * len(batch_counts))
    while number < end and plans + most_plans <= len(found.cost) and found.missing[0] < 0:
        batches = batch_counts[number % len(batch_counts)]
        group = groups[number // len(batch_counts)]
        plans, counted = walk(t, layout, group, num_stage, batches, use_strat, number, plans, found)
        steps += counted
        number += 1
    return number, plans, steps
