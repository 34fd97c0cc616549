"""What distinguishes one transformer from another. Shapes and choices only; nothing about devices."""

import dataclasses
import typing

from mstrain.layers.mlp import ACTIVATIONS

# A null that construction replaces by its number. Type checkers see what the rest of the program does.
if typing.TYPE_CHECKING:
    Automatic = int
else:
    Automatic = int | None

CHOICES = {
    "norm": ("layernorm", "rmsnorm"),
    "position": ("learned", "rotary", "alibi", "none"),
    "bias": ("none", "qkv", "all"),
    "activation": tuple(ACTIVATIONS),
}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer.

    Sizes: `layers`, `width` (D), `heads` (N), `num_kv_heads` (K; null means as many as heads), `head_dim` (H; null
      means width / heads), `mlp_dim` (F; null means 4 x width), `vocab_size` (V; null means the tokenizer's),
      `context` (longest sequence a learned position knows).

    Choices: `norm`, `norm_bias`, `norm_epsilon`, `position`, `rotary_base`, `activation`, `gated` (MLP), `bias`
    (`all` linear layers, only `qkv`, or `none`), `parallel_block` (one norm feeds attention and MLP, both are added
    at once), `tied` (embedding is the output projection), `qk_norm`, `post_norm` (a second norm after each half,
    Gemma 2), `unit_offset_norm` and `scaled_embedding` (Gemma), `attention_soft_cap`, `logit_soft_cap`,
    `attention_scale` (null means head_dim ** -0.5), `window` (every second layer, from the first, sees only so many
    tokens).
    """

    name: str = "custom"
    layers: int = 4
    width: int = 256
    heads: int = 8
    num_kv_heads: Automatic = None  # type: ignore
    head_dim: Automatic = None  # type: ignore
    mlp_dim: Automatic = None  # type: ignore
    vocab_size: int | None = None
    context: int = 2048
    norm: str = "layernorm"
    norm_bias: bool = True
    norm_epsilon: float = 1e-5
    position: str = "learned"
    rotary_base: float = 10000.0
    activation: str = "gelu_tanh"
    gated: bool = False
    bias: str = "all"
    parallel_block: bool = False
    tied: bool = True
    qk_norm: bool = False
    post_norm: bool = False
    unit_offset_norm: bool = False
    scaled_embedding: bool = False
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    attention_scale: float | None = None
    window: int | None = None

    def __post_init__(self):
        for field, choices in CHOICES.items():
            if getattr(self, field) not in choices:
                raise ValueError(
                    f"model.{field}={getattr(self, field)!r} is unknown. Choose one of {', '.join(choices)}."
                )
        for field in ("layers", "width", "heads", "num_kv_heads", "head_dim", "mlp_dim", "vocab_size", "context"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"model.{field}={value} must be at least 1.")
        if self.head_dim is None and self.width % self.heads:
            raise ValueError(
                f"model.width={self.width} does not divide into {self.heads} heads. "
                "Set model.heads to a divisor of the width, or model.head_dim."
            )
        automatic = {"num_kv_heads": self.heads, "head_dim": self.width // self.heads, "mlp_dim": 4 * self.width}
        for field, value in automatic.items():
            if getattr(self, field) is None:
                object.__setattr__(self, field, value)
        if self.heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_kv_heads={self.num_kv_heads} does not divide model.heads={self.heads}. "
                f"Choose one of {[k for k in range(1, self.heads + 1) if self.heads % k == 0]}."
            )
        if self.position == "rotary" and self.head_dim % 2:
            raise ValueError(f"Rotary positions need an even head_dim, not {self.head_dim}. Set model.head_dim.")
