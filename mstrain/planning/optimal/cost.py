"""Cost and memory of a stage, and of a plan.

One iteration of B microbatches takes

    (B - 1) * max stage time + sum of stage times + max over stages of (exchange + update) + B * batch
    generator

milliseconds, the time of a synchronous pipeline (1F1B or GPipe) whose stages all run every microbatch.
The time of a stage is that of its slowest type: layers, tensor collectives that the profiles lack, on the
last stage the profiled time of no layer; and, but for the first stage, receiving the activation and
returning its gradient. Rings move 2 (n - 1) / n of their bytes, within a node at the intra-node and
between nodes at the inter-node bandwidth (one link per node). Stage boundaries use the slowest inter-node
link unless there is a single node.
"""

from dataclasses import dataclass

import numba
import numpy as np

from mstrain.planning.metis.profiles import Key, Profile
from mstrain.planning.optimal.options import PlanOptions
from mstrain.planning.optimal.space import Choice, Kind, nodes_per_replica
from mstrain.planning.optimal.times import Times, interpolate, prefix_sums, share_samples

BYTES_PER_MS = 1e6  # of one GB/s
TENSOR_COLLECTIVES = 4  # all-reduces per layer: attention and MLP, forward and backward
LOGIT_BYTES = 4.0
UNLIMITED = 1 << 30


@dataclass(frozen=True)
class Model:
    """Options, kinds and what layers need; prefixes have L + 1 entries, a range of layers is a difference."""

    options: PlanOptions
    kinds: tuple[Kind, ...]
    times: dict[tuple[int, int], Times]  # by kind and tensor parallel degree
    parameter_bytes: np.ndarray  # (L + 1,) prefix
    activation_bytes: np.ndarray  # (L + 1,) prefix, kept per sample for the backward pass
    middle: np.ndarray  # (L + 1,) prefix of the number of transformer layers

    @property
    def layers(self) -> int:
        return self.options.num_layers


def build_model(options: PlanOptions, kinds: tuple[Kind, ...], profiles: dict[Key, Profile]) -> Model:
    """Interpolate all profiles; the parameters are those of the first profile."""
    times = {
        (index, tp): interpolate(profiles, kind.name, tp, options.batch)
        for index, kind in enumerate(kinds)
        for tp in {tp for name, tp, _ in profiles if name == kind.name}
    }
    token = options.sequence_length * options.hidden_size
    activation = np.full(options.num_layers, options.activation_bytes * token)
    activation[0] = options.element_bytes * token
    activation[-1] = LOGIT_BYTES * options.sequence_length * options.vocab_size
    middle = np.ones(options.num_layers)
    middle[0] = middle[-1] = 0
    parameters = np.array(next(iter(profiles.values())).parameter_bytes, np.float64)
    return Model(options, kinds, times, prefix_sums(parameters), prefix_sums(activation), prefix_sums(middle))


def generator_ms(model: Model) -> float:
    """Batch generator time per microbatch: the slowest type's, at its smallest degree and batch."""
    return max(
        model.times[kind, min(tp for index, tp in model.times if index == kind)].generator_ms
        for kind in range(len(model.kinds))
    )


@dataclass(frozen=True)
class Stage:
    """A choice and a microbatch size, ready to be costed for any layers; arrays by its kinds."""

    choice: Choice
    shares: tuple[int, ...]  # samples per replica, by kind of the choice
    compute_ms: np.ndarray  # (kinds, L + 1) prefix
    sync_ms: np.ndarray  # (kinds,)
    tensor_ms: np.ndarray  # (kinds,) per transformer layer
    boundary_ms: float
    exchange_ms: float  # per parameter byte
    exchange_latency_ms: float
    update_ms: float  # per parameter byte
    state_bytes: float  # per parameter byte and device
    memory_bytes: np.ndarray  # (kinds,) usable per device


def build_stage(model: Model, choice: Choice, samples: int) -> Stage | None:
    """Share the samples of a microbatch over the replicas; None when the profiles do not go so far."""
    options, present = model.options, choice.kinds
    times = [model.times[kind, choice.tp] for kind in present]
    replicas = [1 if choice.spans else choice.replicas[kind] for kind in present]
    totals = [time.total_ms for time in times]
    if choice.spans:
        shares = [samples] * len(present) if samples < min(map(len, totals)) else None
    else:
        shares = share_samples(totals, replicas, samples)
    if shares is None:
        return None
    kinds = [model.kinds[kind] for kind in present]
    message = max(shares) * options.sequence_length * options.hidden_size * options.element_bytes
    one_node = len(model.kinds) == 1 and model.kinds[0].devices <= model.kinds[0].slots
    link = model.kinds[0].intra_gb_s if one_node else min(kind.inter_gb_s for kind in model.kinds)
    exchange_ms, exchange_latency = gradient_exchange(model, choice)
    sharded = choice.dp if options.shard_optimizer else 1
    state = 1 + options.gradient_factor + options.optimizer_factor / sharded
    return Stage(
        choice,
        tuple(shares),
        compute_ms=np.array([time.prefix_ms[share] for time, share in zip(times, shares)]),
        sync_ms=np.array([time.sync_ms[share] for time, share in zip(times, shares)]),
        tensor_ms=np.array(
            [tensor_collectives(model, choice, kind, share) for kind, share in zip(present, shares)]
        ),
        boundary_ms=2 * (options.latency_ms + message / (link * BYTES_PER_MS)),
        exchange_ms=exchange_ms,
        exchange_latency_ms=exchange_latency,
        update_ms=max(time.optimizer_ms for time in times) / model.parameter_bytes[-1] / sharded,
        state_bytes=state / choice.tp,
        memory_bytes=np.array([kind.memory_gb * 1e9 * (1 - options.memory_margin) for kind in kinds]),
    )


def ring_ms(members: int, num_bytes: float, gb_s: float, latency_ms: float) -> float:
    """All-reduce of `num_bytes` over a ring."""
    return 2 * (members - 1) * (num_bytes / members / (gb_s * BYTES_PER_MS) + latency_ms)


def tensor_collectives(model: Model, choice: Choice, kind: int, share: int) -> float:
    """All-reduces of one transformer layer between nodes, and inside one unless the profile has them."""
    options, spec = model.options, model.kinds[kind]
    if share == 0:
        return 0.0
    message = share * options.sequence_length * options.hidden_size * options.element_bytes
    nodes = nodes_per_replica(model.kinds, choice, kind)
    inter = min(model.kinds[index].inter_gb_s for index in (choice.kinds if choice.spans else (kind,)))
    ms = ring_ms(nodes, message, inter, options.latency_ms)
    if not options.collectives_in_profile:
        members = min(choice.tp, spec.slots, choice.devices[kind])
        ms += ring_ms(members, message, spec.intra_gb_s, options.latency_ms)
    return TENSOR_COLLECTIVES * ms


def gradient_exchange(model: Model, choice: Choice) -> tuple[float, float]:
    """(ms per parameter byte, fixed ms) of the all-reduce over replicas: inside nodes, then between them."""
    if choice.dp == 1:
        return 0.0, 0.0
    latency = model.options.latency_ms
    kinds = [model.kinds[kind] for kind in choice.kinds]
    slots = min(kind.slots for kind in kinds)
    inside = max(
        min(choice.replicas[kind], max(1, model.kinds[kind].slots // choice.tp)) for kind in choice.kinds
    )
    groups = sum(
        -(-choice.devices[kind] // model.kinds[kind].slots) // nodes_per_replica(model.kinds, choice, kind)
        for kind in choice.kinds
    )
    intra, inter = min(kind.intra_gb_s for kind in kinds), min(kind.inter_gb_s for kind in kinds)
    shards = min(1, slots / choice.tp)  # part of the parameters in one node
    per_byte = ring_ms(inside, 1 / choice.tp, intra, 0.0) + ring_ms(groups, shards, inter, 0.0)
    return per_byte, 2 * latency * (inside - 1 + groups - 1)


def stage_tables(model: Model, stages: list[Stage]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Stage ms, end-of-iteration ms, microbatches that fit: (begin, end, stage) for layers [begin, end)."""
    shape = (model.layers + 1, model.layers + 1, len(stages))
    stage_ms, flights = np.zeros(shape), np.full(shape, UNLIMITED)
    prefixes = model.parameter_bytes, model.activation_bytes, model.middle
    for kind in range(len(model.kinds)):
        users = [index for index, stage in enumerate(stages) if kind in stage.choice.kinds]
        if users:
            rows = [(stages[index], stages[index].choice.kinds.index(kind)) for index in users]
            terms = np.array(
                [
                    (
                        stage.tensor_ms[row],
                        stage.sync_ms[row],
                        stage.shares[row] / stage.choice.tp,
                        stage.memory_bytes[row],
                        stage.state_bytes,
                    )
                    for stage, row in rows
                ]
            )
            compute_ms = np.array([stage.compute_ms[row] for stage, row in rows]).T
            enter_kind(
                np.array(users),
                np.ascontiguousarray(compute_ms),
                *np.ascontiguousarray(terms.T),
                prefixes,
                stage_ms,
                flights,
            )
    stage_ms[1:] += np.array([stage.boundary_ms for stage in stages])
    parameters = (model.parameter_bytes[None] - model.parameter_bytes[:, None])[:, :, None]
    per_byte = np.array([stage.exchange_ms + stage.update_ms for stage in stages])
    latency = np.array([stage.exchange_latency_ms for stage in stages])
    return stage_ms, per_byte * parameters + latency, flights


@numba.njit(cache=True)
def enter_kind(users, compute_ms, tensor_ms, sync_ms, samples, memory, state, prefixes, stage_ms, flights):
    """Raise the times and lower the flights of stages `users` to what one of their kinds allows, in place.

    `compute_ms` is (L + 1, users), a prefix; the next five are (users,): ms per transformer layer and on
    the last stage, samples / tp, usable bytes, and state bytes per parameter byte.
    """
    parameter_bytes, activation_bytes, middle = prefixes
    layers = len(middle) - 1
    for begin in range(layers):
        for end in range(begin + 1, layers + 1):
            parameters = parameter_bytes[end] - parameter_bytes[begin]
            kept = activation_bytes[end] - activation_bytes[begin]
            for i, user in enumerate(users):
                tensor = tensor_ms[i] * (middle[end] - middle[begin])
                ms = compute_ms[end, i] - compute_ms[begin, i] + tensor
                if end == layers:
                    ms += sync_ms[i]
                stage_ms[begin, end, user] = max(stage_ms[begin, end, user], ms)
                room, held = memory[i] - state[i] * parameters, samples[i] * kept
                if room < 0:
                    flights[begin, end, user] = -1
                elif room < held * flights[begin, end, user]:
                    flights[begin, end, user] = int(room / held)
