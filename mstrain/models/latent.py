"""Sizes of latent attention in the configuration of a model."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, 2024)."""

    key_rank: int | None = None
    """Features of the latent from which keys and values are projected (DeepSeek-V3: 512); null for ordinary
    attention."""
    query_rank: int | None = None
    """Features of the latent from which queries are projected (DeepSeek-V3: 1536); null projects queries directly."""
    rotary_dim: int = 64
    """Number of last features of head_dim that are rotated; those of keys are shared by all heads."""
    value_dim: int = 128
    """Features of a value per head."""
    alternating: bool = True
    """Whether pairs of consecutive features are rotated; false rotates pairs that are half of rotary_dim apart."""

    def check(self, heads: int, num_kv_heads: int, head_dim: int) -> None:
        """Raises ValueError for sizes that do not fit these heads."""
        for name in ("key_rank", "query_rank", "rotary_dim", "value_dim"):
            if (size := getattr(self, name)) is not None and size < 1:
                raise ValueError(f"model.latent.{name}={size} must be at least 1.")
        if self.rotary_dim % 2 or self.rotary_dim >= head_dim:
            raise ValueError(
                f"model.latent.rotary_dim={self.rotary_dim} must be even and less than model.head_dim={head_dim}."
            )
        if num_kv_heads != heads:
            raise ValueError(
                f"model.num_kv_heads={num_kv_heads}: latent attention has as many as heads. Type "
                f"model.num_kv_heads={heads}, or null."
            )
