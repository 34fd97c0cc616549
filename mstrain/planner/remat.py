"""Activation checkpointing: which values of a layer are saved, offloaded to host memory or recomputed."""

import functools
import re
from dataclasses import dataclass

from mstrain.models import remat

PARTS = ("input", "qkv", "scores", "context", "out", "mlp_in", "mlp_out")
"""The values of a layer: its input; queries, keys and values; attention scores; the result of attention; that of the
output projection of attention; the hidden features of the MLP; the result of the MLP."""

NAMES = {
    "input": "layer-input", "qkv": "attention-in", "context": "attention", "out": "attention-out", "mlp_in": "mlp-in",
    "mlp_out": "mlp-out",
}  # fmt: skip
"""Part -> its name in `mstrain.models.remat`, for the parts that train.py can save."""
OWN = {
    policy: frozenset({"input"} | {part for part, name in NAMES.items() if name in kept})
    for policy, kept in remat.POLICIES.items()
}  # the policies of train.py
DOTS = OWN["dots"]
POLICIES = {
    "none": frozenset({"input", "qkv", "scores", "context", "mlp_in", "elementwise"}),
    **OWN,
    "selective": DOTS | {"elementwise"},
    "minimal": DOTS - {"context"},
    "save_dot_except_mlpwi": DOTS - {"context", "mlp_in"},
    "save_dot_except_mlp": DOTS - {"context", "mlp_in", "mlp_out"},
    "save_qkv_proj": frozenset({"input", "qkv"}),
    "save_out_proj": frozenset({"input", "out"}),
    "qkv_proj_offloaded": frozenset({"input", "qkv"}),
    "minimal_offloaded": DOTS,
    "save_dot_with_context_except_mlp": DOTS - {"mlp_in", "mlp_out"},
    "minimal_with_context": DOTS,
}
WORDS = {  # part -> its names in published recipes
    "input": "layer_input layer_inputs decoder_layer_input residual",
    "qkv": "query_proj key_proj value_proj qkv_proj q k v query key value",
    "context": "attention attention_output attention_out",
    "out": "out_projection out_proj",
    "mlp_in": "mlp_input mlp_inputs mlpwi_0 mlpwi_1 mlpwi hidden gate up",
    "mlp_out": "mlp_output mlpwo",
}
PART_OF = {word: part for part, words in WORDS.items() for word in (part, *words.split())}
PART_OF |= {name: part for part, name in NAMES.items()}


@dataclass(frozen=True)
class Remat:
    """Activation checkpointing of a layer.

    Attributes:
      name: the text that describes it.
      saved: the PARTS saved for the backward pass; the other parts are recomputed. If it contains "elementwise", the
        results of norms, dropout and activation functions are saved, too.
      offloaded: the saved parts that are offloaded to host memory.
    """

    name: str
    saved: frozenset[str]
    offloaded: frozenset[str] = frozenset()

    def recomputes(self, part: str) -> bool:
        return part not in self.saved and self.name != "none"

    @property
    def elementwise(self) -> bool:
        """Whether norms and activation functions are recomputed."""
        return self.name != "none" and "elementwise" not in self.saved


@functools.cache
def parse_remat(text: str) -> Remat:
    """Parses a remat policy: a key of POLICIES, or names of saved values joined by `+`.

    Either may be followed by `offload: NAMES`, the values that are offloaded to host memory. Raises ValueError for any
    other text.
    """
    lowered = text.strip().lower()
    if lowered in POLICIES:
        saved = POLICIES[lowered]
        return Remat(lowered, saved, saved - {"input"} if lowered.endswith("offloaded") else frozenset())
    kept, offload, moved = (part.strip() for part in lowered.partition("offload:"))
    saved = POLICIES.get(kept) if offload else None
    if saved is None:
        saved = _parts(text, kept.removeprefix("save:"), kept.startswith("save:")) if kept or not offload else set()
    offloaded = frozenset(_parts(text, moved, True)) if offload else frozenset()
    return Remat(text, frozenset(saved) | offloaded | {"input"}, offloaded)


def _parts(text: str, names: str, stated: bool) -> set[str]:
    """The parts called `names`. Raises ValueError for an unknown name; if `stated`, `text` can only contain names."""
    words = ["_".join(word.split()) for word in re.split(r"[,+]|\band\b", names) if word.strip()]
    unknown = [word for word in words if word not in PART_OF]
    if not words or (unknown and not stated):
        raise ValueError(f"remat {text!r} is unknown. Choose {', '.join(POLICIES)}, 'offload: PARTS' or 'save: PARTS'.")
    if unknown:
        raise ValueError(f"remat part {unknown[0]!r} is unknown. Choose from {', '.join(PART_OF)}.")
    return {PART_OF[word] for word in words}
