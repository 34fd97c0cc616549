"""Options of the optimal planner: model, batch, how memory and links are counted, and the budgets."""

from collections.abc import Iterator
from dataclasses import dataclass

from mstrain.checks import at_least, one_of
from mstrain.planner.clock import check_budget

SCHEDULES = ("1f1b", "gpipe")
POSITIVE = ("num_layers", "batch", "hidden_size", "sequence_length", "vocab_size", "element_bytes", "top_k")
NOT_NEGATIVE = ("latency_ms", "gradient_factor", "optimizer_factor", "activation_bytes", "max_tp", "unit")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """A plan for a mixed cluster. Raises ValueError for a value out of its range."""

    num_layers: int
    """Layers of the model, embedding and output layer included, as in the profiles."""
    batch: int
    """Samples per step of the whole job, any number."""
    hidden_size: int = 4096
    """Width of the model: values per token between layers."""
    sequence_length: int = 1024
    """Tokens per sample."""
    vocab_size: int = 51200
    """Entries of the vocabulary."""
    max_tp: int = 0
    """Largest tensor parallel degree; 0 for the largest profiled."""
    element_bytes: int = 2
    """Bytes of an activation and of a gradient in a message."""
    latency_ms: float = 0.01
    """Latency of one message in milliseconds."""
    schedule: str = "1f1b"
    """Pipeline schedule: 1f1b, or gpipe (all microbatches are in flight at once)."""
    gradient_factor: float = 1.0
    """Gradient bytes per parameter byte."""
    optimizer_factor: float = 6.0
    """Optimizer bytes per parameter byte; 6 is Adam's float32 copy and two moments for bfloat16 parameters."""
    shard_optimizer: bool = False
    """Divide optimizer state and update over the data-parallel replicas of a stage (ZeRO stage 1)."""
    activation_bytes: float = 34.0
    """Bytes of activations that a layer keeps per token and unit of hidden_size (34: Korthikanti et al., 2022)."""
    memory_margin: float = 0.1
    """Part of a device's memory that stays free, from 0 to below 1."""
    collectives_in_profile: bool = True
    """Whether the profiled times contain the tensor-parallel collectives inside a node."""
    unit: int = 0
    """Devices per unit of a stage; 0 for the finest that keeps the search small."""
    max_states: int = 3000
    """Most combinations of stage sizes that unit=0 allows; the time of a search grows with it."""
    top_k: int = 5
    """Number of distinct plans shown."""
    max_seconds: float = 60.0
    """Time budget in seconds of search and simulation, without compiling kernels. Then: the best plans so far."""
    simulate: bool = True
    """Simulate the best plan on every device, where the time budget allows."""
    simulated_microbatches: int = 32
    """Most microbatches simulated, but at least two per stage."""

    def __post_init__(self):
        at_least("", self, **dict.fromkeys((*POSITIVE, "simulated_microbatches", "max_states"), 1))
        at_least("", self, num_layers=2, **dict.fromkeys(NOT_NEGATIVE, 0))
        one_of("schedule", self.schedule, SCHEDULES)
        if not 0 <= self.memory_margin < 1:
            raise ValueError(f"memory_margin={self.memory_margin} is not a part of a memory. Type memory_margin=0.1.")
        check_budget(self.max_seconds)

    @property
    def message_bytes(self) -> int:
        """Of the activation of one sample between layers."""
        return self.sequence_length * self.hidden_size * self.element_bytes

    def state_factors(self, replicas: int) -> dict[str, float]:
        """Bytes of a device per byte of its parameters, by category of memory, of a stage with so many replicas."""
        shards = replicas if self.shard_optimizer else 1
        return {"parameters": 1.0, "gradients": self.gradient_factor, "optimizer": self.optimizer_factor / shards}

    def in_flight(self, microbatches: int, stages: int) -> int:
        """Microbatches between their passes that the first of so many `stages` holds at the most."""
        return microbatches if self.schedule == "gpipe" else min(microbatches, stages)

    def microbatches(self) -> Iterator[tuple[int, int]]:
        """(samples per microbatch, microbatches): every size that a smaller number of microbatches needs.

        Powers of two come first, so that a search whose time ends has seen sizes of every order.
        """
        powers = [1 << power for power in range(self.batch.bit_length())]
        sizes = dict.fromkeys(-(-self.batch // -(-self.batch // size)) for size in powers)
        yield from ((size, -(-self.batch // size)) for size in sizes)
        size = 1
        while size <= self.batch:
            count = -(-self.batch // size)
            if size not in sizes:  # the least of its count
                yield size, count
            size = (self.batch - 1) // (count - 1) + 1 if count > 1 else self.batch + 1
