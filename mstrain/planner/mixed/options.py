"""What the optimal planner is asked: model, batch, how memory and links are reckoned, and the budgets."""

from dataclasses import dataclass

SCHEDULES = ("1f1b", "gpipe")


@dataclass(frozen=True)
class PlanOptions:
    """Checked on construction (ValueError). Sizes in elements, times in ms, memory factors as stated."""

    num_layers: int  # with embedding and output layer, as in the profiles
    batch: int  # global batch in samples, any number
    hidden_size: int = 4096
    sequence_length: int = 1024
    vocab_size: int = 51200
    max_tp: int = 0  # largest tensor parallel degree; 0: largest profiled
    element_bytes: int = 2  # of activations and gradients on the wire
    latency_ms: float = 0.01  # of one message
    schedule: str = "1f1b"  # or gpipe: all microbatches in flight
    gradient_factor: float = 1.0  # gradient bytes per parameter byte
    optimizer_factor: float = 6.0  # Adam: float32 master copy and two moments for bfloat16 parameters
    shard_optimizer: bool = False  # divide optimizer state and update over the replicas
    activation_bytes: float = 34.0  # per token, hidden unit, layer (Korthikanti 2022)
    memory_margin: float = 0.1  # part of the memory left free
    collectives_in_profile: bool = True  # False: the profiles lack the tensor collectives inside a node
    unit: int = 0  # devices per unit of a stage; 0: the finest that keeps the search small
    max_states: int = 3000  # limit that `unit=0` respects
    top_k: int = 5
    max_seconds: float = 60.0
    simulate: bool = True  # the best plan, on every device
    simulated_microbatches: int = 32  # at most so many, but two per stage

    def __post_init__(self):
        for name in (
            "num_layers",
            "batch",
            "hidden_size",
            "sequence_length",
            "vocab_size",
            "element_bytes",
            "top_k",
            "simulated_microbatches",
        ):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r}: give an integer of 1 or more")
        if self.num_layers < 2:
            raise ValueError(f"num_layers={self.num_layers}: give 2 or more (embedding, output layer)")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule={self.schedule}: choose one of {', '.join(SCHEDULES)}")
        if not 0 <= self.memory_margin < 1:
            raise ValueError(f"memory_margin={self.memory_margin}: give a part from 0 to below 1, e.g. 0.1")
        for name in (
            "latency_ms",
            "gradient_factor",
            "optimizer_factor",
            "activation_bytes",
            "max_tp",
            "unit",
        ):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)}: give 0 or more")
        if not self.max_seconds > 0 or self.max_states < 1:
            raise ValueError("the budget is empty: give max_seconds > 0 and max_states >= 1")

    def microbatches(self) -> list[tuple[int, int]]:
        """(samples per microbatch, microbatches): every size that a smaller number of microbatches needs."""
        counts = {-(-self.batch // size) for size in range(1, self.batch + 1)}
        return [(-(-self.batch // count), count) for count in sorted(counts)]
