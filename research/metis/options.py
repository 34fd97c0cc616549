"""Options of a Metis search: model sizes, profile limits, and the inputs that the reference leaves to chance."""

from dataclasses import dataclass

from mstrain.checks import at_least
from mstrain.planner.clock import check_budget

POSITIVE = ("gbs", "hidden_size", "sequence_length", "vocab_size", "max_profiled_tp_degree", "max_profiled_batch_size",
            "max_permute_len", "trials", "top_k", "max_plans")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MetisOptions:
    """Options of the reference under its own names, then ours. Raises ValueError for a value out of its range."""

    num_layers: int
    """Layers of the model, embedding and output layer included."""
    gbs: int
    """Global batch size in samples."""
    hidden_size: int = 4096
    """Width of the model: values per token between layers."""
    sequence_length: int = 1024
    """Tokens per sample."""
    vocab_size: int = 51200
    """Entries of the vocabulary."""
    max_profiled_tp_degree: int = 128
    """Largest profiled tensor parallel degree."""
    max_profiled_batch_size: int = 128
    """Largest profiled batch in samples."""
    min_group_scale_variance: int = 1
    """Fewest devices of a stage, as a multiple of the even share; 0 for no limit, which takes minutes from 32
    devices on and ends with max_plans or max_seconds on large clusters."""
    max_permute_len: int = 128
    """Stages beyond which device groups are permuted in bundles."""
    use_strat: bool = False
    """The improved walk, guided by the first attempt's memory."""
    trials: int = 1
    """Number of searches whose times are averaged."""
    device_order: tuple[str, ...] = ()
    """First node sequence; empty for the alphabetical one."""
    reference_profile: str = ""
    """File name of the profile of optimizer and batch generator; empty for the first type, largest tp and batch."""
    top_k: int = 10
    """Number of plans kept in the result."""
    max_seconds: float = 3600.0
    """Time budget in seconds of a search; compiling kernels does not count. Then: the plans found so far."""
    max_plans: int = 10_000_000
    """Inter-stage plans after which the plans found so far are returned."""

    def __post_init__(self):
        at_least("", self, num_layers=2, min_group_scale_variance=0, **dict.fromkeys(POSITIVE, 1))
        check_budget(self.max_seconds)
