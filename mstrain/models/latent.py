"""Sizes of latent attention in the configuration of a model."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, 2024)."""

    key_rank: int | None = None
    """Features that keys and values follow from (DeepSeek-V3: 512); null for ordinary attention."""
    query_rank: int | None = None
    """Features that queries follow from (1536); null projects queries directly."""
    rotary_dim: int = 64
    """The last features of a head's head_dim, which are rotated; of keys, all heads share them."""
    value_dim: int = 128
    """Features of a value per head."""
    alternating: bool = True
    """Whether consecutive features are rotated as pairs, and not those half of rotary_dim apart."""

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
