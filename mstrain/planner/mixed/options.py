"""Options of the optimal planner: model, batch, assumptions about memory and links, and limits of the search."""

from collections.abc import Iterator
from dataclasses import dataclass

from mstrain.checks import at_least, one_of
from mstrain.planner.clock import check_budget

SCHEDULES = ("1f1b", "gpipe")
POSITIVE = ("num_layers", "batch", "hidden_size", "sequence_length", "vocab_size", "element_bytes", "top_k")
NOT_NEGATIVE = ("latency_ms", "gradient_factor", "optimizer_factor", "activation_bytes", "max_tp", "unit")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of a search for the optimal plan of a mixed cluster. Raises ValueError for a value out of its range."""

    num_layers: int
    """Number of layers, including the embedding and the output layer, as in the profiles."""
    batch: int
    """Global batch size: samples (sequences) per step. It need not be a power of two."""
    hidden_size: int = 4096
    """Width of the model: features per token of the activations between layers."""
    sequence_length: int = 1024
    """Tokens per sample."""
    vocab_size: int = 51200
    """Number of tokens in the vocabulary, which is the width of the output layer."""
    max_tp: int = 0
    """Largest tensor-parallel degree; 0 for the largest one that has a profile."""
    element_bytes: int = 2
    """Bytes per element of activations and their gradients in messages: 2 for bf16, 4 for float32."""
    latency_ms: float = 0.01
    """Latency of a message, in milliseconds."""
    schedule: str = "1f1b"
    """Pipeline schedule: 1f1b, or gpipe (all forward passes first, which keeps all microbatches in memory)."""
    gradient_factor: float = 1.0
    """Bytes of gradients per byte of parameters."""
    optimizer_factor: float = 6.0
    """Bytes of optimizer state per byte of parameters: 6 for Adam with bf16 parameters (float32 copy and moments)."""
    shard_optimizer: bool = False
    """Shard the optimizer state and the update over the data-parallel replicas of a stage (ZeRO 1)."""
    activation_bytes: float = 34.0
    """Bytes of activations that a layer keeps for its backward pass, per token and feature of hidden_size (34:
    Korthikanti et al., 2022)."""
    memory_margin: float = 0.1
    """Fraction of the memory of a device that plans leave free, from 0 to below 1."""
    collectives_in_profile: bool = True
    """Whether profiled times include tensor-parallel collectives within a node; if not, the cost model adds them."""
    unit: int = 0
    """The number of devices of a stage is a multiple of this divisor of the devices per node; 0 for the smallest with
    which the cluster has at most max_states states."""
    max_states: int = 3000
    """Largest number of states that unit=0 allows. A state is the number of free devices of each kind of host; the time
    of a search grows with the number of states."""
    top_k: int = 5
    """Number of distinct plans printed."""
    max_seconds: float = 60.0
    """Time limit in seconds of search and simulation, not counting the compilation of kernels. When it ends the search,
    the best plans so far are printed."""
    simulate: bool = True
    """Simulate the best plan on all devices, if the time limit allows."""
    simulated_microbatches: int = 32
    """Largest number of microbatches simulated; a pipeline has at least two per stage."""

    def __post_init__(self):
        at_least("", self, **dict.fromkeys((*POSITIVE, "simulated_microbatches", "max_states"), 1))
        at_least("", self, num_layers=2, **dict.fromkeys(NOT_NEGATIVE, 0))
        one_of("schedule", self.schedule, SCHEDULES)
        if not 0 <= self.memory_margin < 1:
            margin = f"memory_margin={self.memory_margin}"
            raise ValueError(f"{margin} is not a fraction from 0 to below 1. Type memory_margin=0.1.")
        check_budget(self.max_seconds)

    @property
    def message_bytes(self) -> int:
        """Bytes of the activations of one sample between two layers."""
        return self.sequence_length * self.hidden_size * self.element_bytes

    def state_factors(self, replicas: int) -> dict[str, float]:
        """Bytes of state per byte of parameters, by category of memory, on a device of a stage with `replicas`."""
        shards = replicas if self.shard_optimizer else 1
        return {"parameters": 1.0, "gradients": self.gradient_factor, "optimizer": self.optimizer_factor / shards}

    def in_flight(self, microbatches: int, stages: int) -> int:
        """Largest number of microbatches between their forward and backward passes on the first of `stages` stages."""
        return microbatches if self.schedule == "gpipe" else min(microbatches, stages)

    def microbatches(self) -> Iterator[tuple[int, int]]:
        """(samples per microbatch, number of microbatches): for each number of microbatches, the smallest size.

        Powers of two come first, so that a search that stops early has covered sizes of every magnitude.
        """
        powers = [1 << power for power in range(self.batch.bit_length())]
        sizes = dict.fromkeys(-(-self.batch // -(-self.batch // size)) for size in powers)
        yield from ((size, -(-self.batch // size)) for size in sizes)
        size = 1
        while size <= self.batch:
            count = -(-self.batch // size)
            if size not in sizes:  # the smallest size with this number of microbatches
                yield size, count
            size = (self.batch - 1) // (count - 1) + 1 if count > 1 else self.batch + 1
