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
    """A decoder-only transformer."""

    name: str = "custom"
    """Name in tables and run records."""
    layers: int = 4
    """Number of blocks."""
    width: int = 256
    """Width of the residual stream (D)."""
    heads: int = 8
    """Query heads (N)."""
    num_kv_heads: Automatic = None  # type: ignore
    """Key and value heads (K); null takes as many as heads."""
    head_dim: Automatic = None  # type: ignore
    """Features of a head (H); null takes width / heads."""
    mlp_dim: Automatic = None  # type: ignore
    """Hidden features of the MLP (F); null takes 4 x width."""
    vocab_size: int | None = None
    """Tokens of the embedding (V); null takes the tokenizer's."""
    context: int = 2048
    """Longest sequence that learned positions know."""
    norm: str = "layernorm"
    """`layernorm` or `rmsnorm`."""
    norm_bias: bool = True
    """Whether a layernorm has a bias."""
    norm_epsilon: float = 1e-5
    """Added to the variance in a norm."""
    position: str = "learned"
    """`learned`, `rotary`, `alibi` or `none`."""
    rotary_base: float = 10000.0
    """Base of the rotary frequencies."""
    activation: str = "gelu_tanh"
    """Activation of the MLP: gelu_tanh, gelu, silu, relu and others."""
    gated: bool = False
    """Whether the MLP multiplies its activation by a second projection."""
    bias: str = "all"
    """Biases of linear layers: `all`, `qkv` alone, or `none`."""
    parallel_block: bool = False
    """One norm feeds attention and MLP, and both are added at once."""
    tied: bool = True
    """The embedding table is the output projection, too."""
    qk_norm: bool = False
    """Norms of queries and keys per head."""
    post_norm: bool = False
    """A second norm after each half of a block (Gemma 2)."""
    unit_offset_norm: bool = False
    """Norm scales are stored minus one (Gemma)."""
    scaled_embedding: bool = False
    """Embeddings are multiplied by the root of the width (Gemma)."""
    attention_soft_cap: float | None = None
    """Soft cap of attention scores: cap x tanh(score / cap); null for none."""
    logit_soft_cap: float | None = None
    """Soft cap of the logits; null for none."""
    attention_scale: float | None = None
    """Factor of the attention scores; null takes head_dim ** -0.5."""
    window: int | None = None
    """Tokens that every second layer sees, from the first layer on; null sees all."""

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
