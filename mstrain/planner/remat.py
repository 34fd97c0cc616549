"""What a layer recomputes for its backward pass, and what of it waits in host memory."""

import functools
import re
from dataclasses import dataclass

PARTS = ("input", "qkv", "scores", "context", "out", "mlp_in", "mlp_out")
"""Of a layer: its input; queries, keys and values; attention scores; attention's result; the output projection's
result; the MLP's hidden features; the MLP's result."""

DOTS = frozenset({"input", "qkv", "context", "out", "mlp_in", "mlp_out"})
POLICIES = {
    "none": frozenset({"input", "qkv", "scores", "context", "mlp_in", "elementwise"}),
    "selective": DOTS | {"elementwise"},
    "dots": DOTS,
    "minimal": DOTS,
    "dots-but-mlp-in": DOTS - {"mlp_in"},
    "save_dot_except_mlpwi": DOTS - {"mlp_in"},
    "save_dot_except_mlp": DOTS - {"mlp_in", "mlp_out"},
    "attention": frozenset({"input", "context"}),
    "save_qkv_proj": frozenset({"input", "qkv"}),
    "save_out_proj": frozenset({"input", "out"}),
    "qkv_proj_offloaded": frozenset({"input", "qkv"}),
    "minimal_offloaded": DOTS,
    "save_dot_with_context_except_mlp": DOTS - {"mlp_in", "mlp_out"},
    "minimal_with_context": DOTS,
    "full": frozenset({"input"}),
}
WORDS = {
    "layer inputs": "input", "decoder layer input": "input", "decoder_layer_input": "input", "residual": "input",
    "query_proj": "qkv", "key_proj": "qkv", "value_proj": "qkv", "qkv_proj": "qkv", "attention output": "context",
    "attention_out": "context", "out projection": "out", "mlp input": "mlp_in", "mlp inputs": "mlp_in",
    "mlpwi_0": "mlp_in", "mlpwi_1": "mlp_in", "hidden": "mlp_in", "mlp output": "mlp_out",
    "input": "input", "layer input": "input", "q": "qkv", "k": "qkv", "v": "qkv", "qkv": "qkv", "query": "qkv",
    "key": "qkv", "value": "qkv", "context": "context", "attention": "context", "out": "out", "out_proj": "out",
    "mlp in": "mlp_in", "mlp_in": "mlp_in", "mlpwi": "mlp_in", "gate": "mlp_in", "up": "mlp_in",
    "mlp out": "mlp_out", "mlp_out": "mlp_out", "mlpwo": "mlp_out",
}  # fmt: skip


@dataclass(frozen=True)
class Remat:
    """Activation checkpointing of a layer.

    Attributes:
      saved: the PARTS kept for the backward pass; the rest is recomputed. "elementwise" among them: the results of
        norms, dropout and activation functions, too.
      offloaded: those of them that wait in host memory.
    """

    name: str
    saved: frozenset[str]
    offloaded: frozenset[str] = frozenset()

    def recomputes(self, part: str) -> bool:
        return part not in self.saved and self.name != "none"

    @property
    def elementwise(self) -> bool:
        """Whether norms and activation functions run again."""
        return self.name != "none" and "elementwise" not in self.saved


@functools.cache
def parse_remat(text: str) -> Remat:
    """`none`, `selective`, `dots`, `full`, ..., or `offload: PARTS` (those wait in host memory, the rest recomputes).

    Raises ValueError for any other text.
    """
    lowered = text.strip().lower()
    match = re.fullmatch(r"(offload|save)\s*:\s*(.+)", lowered)
    if match:
        words = [word.strip() for word in re.split(r",|\band\b", match[2]) if word.strip()]
        unknown = [word for word in words if word not in WORDS]
        if unknown:
            raise ValueError(f"remat part {unknown[0]!r} is unknown. Choose from {', '.join(WORDS)}.")
        parts = frozenset(WORDS[word] for word in words) | {"input"}
        return Remat(text, parts, parts if match[1] == "offload" else frozenset())
    if lowered not in POLICIES:
        raise ValueError(f"remat {text!r} is unknown. Choose {', '.join(POLICIES)}, 'offload: PARTS' or 'save: PARTS'.")
    saved = POLICIES[lowered]
    return Remat(lowered, saved, saved - {"input"} if lowered.endswith("offloaded") else frozenset())
