"""What a Metis search is asked: model sizes, profile limits, the inputs the reference leaves to chance."""

from dataclasses import dataclass, fields

POSITIVE = ("num_layers", "gbs", "hidden_size", "sequence_length", "vocab_size", "max_profiled_tp_degree",
            "max_profiled_batch_size", "min_group_scale_variance", "max_permute_len", "trials", "top_k")


@dataclass(frozen=True)
class MetisOptions:
    """Options of the reference under its own names, then ours. Checked on construction (ValueError)."""

    num_layers: int                     # with embedding and output layer
    gbs: int                            # global batch size in samples
    hidden_size: int = 4096
    sequence_length: int = 1024
    vocab_size: int = 51200
    max_profiled_tp_degree: int = 128
    max_profiled_batch_size: int = 128
    min_group_scale_variance: int = 1
    max_permute_len: int = 128
    use_strat: bool = False             # the improved walk, guided by the first attempt's memory
    trials: int = 1                     # the whole search is repeated for the average time
    device_order: tuple[str, ...] = ()  # first node sequence; empty: alphabetical
    reference_profile: str = ""         # file name; empty: first type, largest tp, largest batch
    top_k: int = 10                     # plans kept in the result
    max_seconds: float = 3600.0         # search time after which the plans found so far are returned
    max_plans: int = 10_000_000         # inter-stage plans after which they are

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in POSITIVE and (type(value) is not int or value < 1):
                raise ValueError(f"{field.name}={value!r}: give an integer of 1 or more")
        if self.num_layers < 2:
            raise ValueError(f"num_layers={self.num_layers}: give 2 or more (embedding, output layer)")
        if not self.max_seconds > 0 or self.max_plans < 1:
            raise ValueError("the budget is empty: give max_seconds > 0 and max_plans >= 1")
