"""Time and memory of a stage; `iteration_terms` computes the time of a plan from those of its stages.

The time of a stage is that of its slowest device type: its layers, tensor-parallel collectives that are not in the
profiles and, on the last stage, the profiled time that belongs to no layer. Every stage but the first also receives an
activation and returns its gradient. A ring all-reduce over n members sends 2 (n - 1) / n of its bytes, at the
intra-node bandwidth within a node and at the inter-node bandwidth (one link per node) between nodes. Messages between
stages use the slowest inter-node link, unless the cluster is a single node.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from mstrain.hardware import Link
from mstrain.hardware.layer_profiles import Key, Profile
from mstrain.hardware.link import ring_seconds
from mstrain.planner.mixed.options import PlanOptions
from mstrain.planner.mixed.space import Choice, Kind, nodes_per_replica
from mstrain.planner.mixed.times import Times, degrees_of, interpolate, prefix_sums, share_samples

BYTES_PER_MS = 1e6  # bytes/ms in one GB/s
TENSOR_COLLECTIVES = 4  # all-reduces per layer: attention and MLP, forward and backward
LOGIT_BYTES = 4.0  # float32
UNLIMITED = 1 << 30  # microbatches that fit where a stage saves no activations


@dataclass(frozen=True)
class Model:
    """Options, kinds of nodes, and times and memory of layers.

    Prefix sums have L + 1 entries; the sum over a range of layers is a difference of two entries.
    """

    options: PlanOptions
    kinds: tuple[Kind, ...]
    times: dict[tuple[int, int], Times]  # by kind and tensor parallel degree
    parameter_bytes: np.ndarray  # (L + 1,) prefix
    activation_bytes: np.ndarray  # (L + 1,) prefix, saved per sample for the backward pass
    middle: np.ndarray  # (L + 1,) prefix, number of transformer layers (all but the first and the last layer)

    @property
    def layers(self) -> int:
        return self.options.num_layers

    @cached_property
    def generator_ms(self) -> dict[int, float]:
        """Ms of the batch generator per microbatch of every kind, at its smallest degree and batch."""
        smallest = {kind: min(tp for index, tp in self.times if index == kind) for kind, _ in self.times}
        return {kind: self.times[kind, tp].generator_ms for kind, tp in smallest.items()}

    def held(self, begin, end):
        """Bytes of (parameters, activations per sample) of layers [begin, end), or of arrays of them."""
        return tuple(prefix[end] - prefix[begin] for prefix in (self.parameter_bytes, self.activation_bytes))


def build_model(options: PlanOptions, kinds: tuple[Kind, ...], profiles: dict[Key, Profile]) -> Model:
    """The model with all profiles interpolated; bytes of parameters are those of the first profile."""
    times = {
        (index, tp): interpolate(profiles, kind.name, tp, options.batch)
        for index, kind in enumerate(kinds)
        for tp in degrees_of(profiles, kind.name)
    }
    token = options.sequence_length * options.hidden_size
    activation = np.full(options.num_layers, options.activation_bytes * token)
    activation[0] = options.element_bytes * token
    activation[-1] = LOGIT_BYTES * options.sequence_length * options.vocab_size
    middle = np.ones(options.num_layers)
    middle[0] = middle[-1] = 0
    parameters = np.array(next(iter(profiles.values())).parameter_bytes, np.float64)
    return Model(options, kinds, times, prefix_sums(parameters), prefix_sums(activation), prefix_sums(middle))


class StageTimes(NamedTuple):
    """Ms of a stage: the first four per microbatch, the last two per iteration.

    The first three have shape (kinds, ...), the others (...), where ... is the shape of the layer ranges.
    """

    compute: np.ndarray  # layers
    tensor: np.ndarray  # tensor-parallel collectives that are not in the profiles
    sync: np.ndarray  # on the last stage, the profiled time that belongs to no layer
    boundary: np.ndarray  # receiving an activation and returning its gradient; 0 on the first stage
    exchange: np.ndarray  # all-reduce of gradients over replicas
    update: np.ndarray  # optimizer update

    @property
    def by_kind(self) -> np.ndarray:
        return self.compute + self.tensor + self.sync

    @property
    def stage(self) -> np.ndarray:
        return self.by_kind.max(axis=0) + self.boundary

    @property
    def end(self) -> np.ndarray:
        return self.exchange + self.update


@dataclass(frozen=True)
class Stage:
    """A choice at one microbatch size, with the rates to compute its time for any layers.

    Arrays have one entry per kind of the choice.
    """

    choice: Choice
    shares: tuple[int, ...]  # samples per replica and microbatch, by kind of the choice
    compute_ms: np.ndarray  # (kinds, L + 1) prefix
    sync_ms: np.ndarray  # (kinds,)
    tensor_ms: np.ndarray  # (kinds,) per transformer layer
    boundary_ms: float
    exchange_ms: float  # per parameter byte
    exchange_latency_ms: float
    update_ms: float  # per parameter byte
    state_bytes: float  # per parameter byte and device
    memory_bytes: np.ndarray  # (kinds,) usable per device
    generator_ms: float  # batch generator per microbatch, if this is the first stage

    def times(self, model: Model, begin, end) -> StageTimes:
        """Times of the stage with layers [begin, end); `begin` and `end` are numbers, or arrays that broadcast."""
        parameters, _ = model.held(begin, end)
        return StageTimes(
            compute=self.compute_ms[:, end] - self.compute_ms[:, begin],
            tensor=np.multiply.outer(self.tensor_ms, model.middle[end] - model.middle[begin]),
            sync=np.multiply.outer(self.sync_ms, end == model.layers),
            boundary=self.boundary_ms * (begin > 0),
            exchange=self.exchange_ms * parameters + self.exchange_latency_ms,
            update=self.update_ms * parameters,
        )

    def fitting(self, parameter_bytes: np.ndarray, sample_bytes: np.ndarray) -> np.ndarray:
        """Microbatches whose activations fit in memory with the state of the layers; -1 if the state does not fit.

        `parameter_bytes` and `sample_bytes` are bytes of parameters, and of activations per sample, of layer ranges.
        """
        free = np.subtract.outer(self.memory_bytes, self.state_bytes * parameter_bytes)
        held = np.multiply.outer(np.array(self.shares) / self.choice.tp, sample_bytes)
        most = np.floor(np.divide(free, held, out=np.full_like(free, UNLIMITED), where=held > 0))
        return np.where(free < 0, -1, np.minimum(most, UNLIMITED)).min(axis=0)


def build_stage(model: Model, choice: Choice, samples: int) -> Stage | None:
    """The stage of a choice, with the `samples` of a microbatch distributed over its replicas.

    None if a replica gets more samples than the largest profiled batch.
    """
    options, present = model.options, choice.kinds
    kinds, times = [model.kinds[kind] for kind in present], [model.times[kind, choice.tp] for kind in present]
    totals = [time.total_ms for time in times]
    if choice.spans:
        shares = [samples] * len(present) if samples < min(map(len, totals)) else None
    else:
        shares = share_samples(totals, [choice.replicas[kind] for kind in present], samples)
    if shares is None:
        return None
    message = max(shares) * options.message_bytes
    one_node = len(model.kinds) == 1 and model.kinds[0].devices <= model.kinds[0].slots
    link = model.kinds[0].intra_gb_s if one_node else min(kind.inter_gb_s for kind in model.kinds)
    exchange_ms, exchange_latency = gradient_exchange(model, choice)
    sharded = choice.dp if options.shard_optimizer else 1
    return Stage(
        choice,
        tuple(shares),
        compute_ms=np.array([time.prefix_ms[share] for time, share in zip(times, shares)]),
        sync_ms=np.array([time.sync_ms[share] for time, share in zip(times, shares)]),
        tensor_ms=np.array([tensor_collectives(model, choice, kind, share) for kind, share in zip(present, shares)]),
        boundary_ms=2 * (options.latency_ms + message / (link * BYTES_PER_MS)),
        exchange_ms=exchange_ms,
        exchange_latency_ms=exchange_latency,
        update_ms=max(time.optimizer_ms for time in times) / model.parameter_bytes[-1] / sharded,
        state_bytes=sum(options.state_factors(choice.dp).values()) / choice.tp,
        memory_bytes=np.array([kind.memory_gb * 1e9 * (1 - options.memory_margin) for kind in kinds]),
        generator_ms=max(model.generator_ms[kind] for kind in present),
    )


def all_reduce_ms(members: int, num_bytes: float, gb_s: float, latency_ms: float) -> float:
    """Ms of a ring all-reduce of `num_bytes` bytes over links of `gb_s` GB/s."""
    return 1e3 * ring_seconds("AllReduce", num_bytes, members, Link(0.0, 1e-3 * latency_ms, 1e9 * gb_s))


def tensor_collectives(model: Model, choice: Choice, kind: int, share: int) -> float:
    """Ms of the tensor-parallel all-reduces of one transformer layer and microbatch that are not in the profiles.

    They are those between nodes and, unless the profiles include them, those within a node.
    """
    options, spec = model.options, model.kinds[kind]
    if share == 0:
        return 0.0
    nodes = nodes_per_replica(model.kinds, choice, kind)
    inter = min(model.kinds[index].inter_gb_s for index in (choice.kinds if choice.spans else (kind,)))
    ms = all_reduce_ms(nodes, share * options.message_bytes, inter, options.latency_ms)
    if not options.collectives_in_profile:
        members = min(choice.tp, spec.slots, choice.devices[kind])
        ms += all_reduce_ms(members, share * options.message_bytes, spec.intra_gb_s, options.latency_ms)
    return TENSOR_COLLECTIVES * ms


def gradient_exchange(model: Model, choice: Choice) -> tuple[float, float]:
    """(ms per parameter byte, latency in ms) of the all-reduce of gradients: within nodes, then between nodes."""
    if choice.dp == 1:
        return 0.0, 0.0
    present = [(model.kinds[index], index) for index in choice.kinds]
    inside = max(min(choice.replicas[index], max(1, kind.slots // choice.tp)) for kind, index in present)
    groups = sum(
        -(-choice.devices[index] // kind.slots) // nodes_per_replica(model.kinds, choice, index)
        for kind, index in present
    )
    slots, intra, inter = (
        min(getattr(kind, name) for kind, _ in present) for name in ("slots", "intra_gb_s", "inter_gb_s")
    )
    shards = min(1, slots / choice.tp)  # fraction of the parameters in one node
    per_byte = all_reduce_ms(inside, 1 / choice.tp, intra, 0.0) + all_reduce_ms(groups, shards, inter, 0.0)
    return per_byte, 2 * model.options.latency_ms * (inside - 1 + groups - 1)
