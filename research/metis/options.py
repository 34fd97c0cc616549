"""Options of a Metis search: model, limits of the profiles, and choices that the reference leaves undetermined."""

from dataclasses import dataclass

from mstrain.checks import at_least
from mstrain.planner.clock import check_budget

POSITIVE = ("gbs", "hidden_size", "sequence_length", "vocab_size", "max_profiled_tp_degree", "max_profiled_batch_size",
            "max_permute_len", "trials", "top_k", "max_plans")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MetisOptions:
    """Options of the reference implementation, up to use_strat under its own names, then those added here. Raises
    ValueError for a value out of its range."""

    num_layers: int
    """Number of layers, including the embedding and the output layer, as in the profiles."""
    gbs: int
    """Global batch size: samples (sequences) per step."""
    hidden_size: int = 4096
    """Width of the model: features per token of the activations between layers."""
    sequence_length: int = 1024
    """Tokens per sample."""
    vocab_size: int = 51200
    """Number of tokens in the vocabulary, which is the width of the output layer."""
    max_profiled_tp_degree: int = 128
    """Largest tensor-parallel degree that has a profile."""
    max_profiled_batch_size: int = 128
    """Largest batch, in samples, that has a profile."""
    min_group_scale_variance: int = 1
    """Lower limit on the devices of a stage, relative to devices / stages: 1 admits no smaller stage, 0 admits all
    sizes. With 0, a search takes minutes from 32 devices on, and max_plans or max_seconds ends it on large clusters."""
    max_permute_len: int = 128
    """Largest number of stages whose sizes are permuted one by one. With more stages, neighboring ones are
    joined into this many bundles (if possible), which are permuted."""
    use_strat: bool = False
    """Use the improved search of livingshade/Metis, which replaces data by tensor parallelism in the stage that had the
    least memory left at the first layer partition."""
    trials: int = 1
    """Number of times the search is run; the printed time is their mean."""
    device_order: tuple[str, ...] = ()
    """Order of the device types in the first node sequence, such as '[A100,V100]'; empty for alphabetical order."""
    reference_profile: str = ""
    """File name of the profile that supplies the times of optimizer and batch generator and the sizes of parameters;
    empty for the first type, its largest tensor-parallel degree and its largest batch."""
    top_k: int = 10
    """Number of plans in the ranking that is written."""
    max_seconds: float = 3600.0
    """Time limit in seconds of a search, not counting the compilation of kernels. When it ends the search, the plans
    found so far are ranked."""
    max_plans: int = 10_000_000
    """Largest number of inter-stage plans that are evaluated; the plans found so far are then ranked."""

    def __post_init__(self):
        at_least("", self, num_layers=2, min_group_scale_variance=0, **dict.fromkeys(POSITIVE, 1))
        check_budget(self.max_seconds)
