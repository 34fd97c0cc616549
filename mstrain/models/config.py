"""Sizes and architecture of a model. Independent of devices and parallelism."""

import dataclasses
import functools
import math
import typing
from typing import Any

from mstrain.layers.mlp import ACTIVATIONS, GATES
from mstrain.layers.rotary import check_scaling, rotated_width
from mstrain.layers.router import SCORES, RouterConfig
from mstrain.models.latent import LatentConfig

# Construction replaces null by a number, so type checkers see an int.
if typing.TYPE_CHECKING:
    Automatic = int
else:
    Automatic = int | None

CHOICES = {
    "norm": ("layernorm", "rmsnorm"),
    "position": ("learned", "rotary", "alibi", "none"),
    "bias": ("none", "qkv", "attention", "all"),
    "activation": (*ACTIVATIONS, *GATES),
    "router": SCORES,
}
SIZES = ("layers", "width", "heads", "num_kv_heads", "head_dim", "mlp_dim", "vocab_size", "context", "experts")
POSITIVE = (
    "init_scale", "norm_epsilon", "rotary_base", "local_rotary_base", "attention_soft_cap", "logit_soft_cap",
    "attention_scale", "window",
)  # fmt: skip
BALANCE_FIELDS = ("balance_loss", "router_z_loss", "balance_rate")
MTP_FIELDS = ("mtp_layers", "mtp_loss")
TRAINING_FIELDS = ("init_scale", *BALANCE_FIELDS, *MTP_FIELDS)  # they do not change what a model computes
EXPERT_FIELDS = (
    "experts_per_token", "router", "router_normalized", "router_scale", *BALANCE_FIELDS, "expert_capacity",
    "router_groups", "router_best_groups", "shared_experts", "dense_layers", "dense_mlp_dim",
)  # fmt: skip


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
    """Features per head (H); null takes width / heads."""
    mlp_dim: Automatic = None  # type: ignore
    """Hidden features of the MLP (F); null takes 4 x width."""
    vocab_size: int | None = None
    """Tokens of the embedding (V); null takes the tokenizer's."""
    context: int = 2048
    """Longest sequence, in tokens, that learned positions support."""
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
    rotary_fraction: float = 1.0
    """Fraction of the features of a head that are rotated (Phi-4 mini: 0.75)."""
    rotary_scaling: str | None = None
    """Scaling of the rotary frequencies: `linear:FACTOR`, `llama3:FACTOR:LOW:HIGH:CONTEXT` (Llama 3.1),
    `yarn:FACTOR:HIGH:LOW:CONTEXT:GAIN` or `yarn-unrounded:...` (gpt-oss), or null."""
    local_rotary_base: float | None = None
    """Base in layers with a window, where frequencies are not scaled (Gemma 3); null takes rotary_base."""
    activation: str = "gelu_tanh"
    """Activation of the MLP: `gelu_tanh`, `gelu`, `silu` or `relu`; with gated=true also `clamped_swiglu` (gpt-oss)."""
    gated: bool = False
    """Whether the MLP multiplies its activation by a second projection."""
    bias: str = "all"
    """Biases of linear layers: `all` (including experts and routers), `attention` (both projections), `qkv` (only the
    projection to queries, keys and values), or `none`."""
    parallel_block: bool = False
    """Whether attention and MLP read the same norm and are added in parallel."""
    tied: bool = True
    """Whether the output projection shares the embedding table."""
    qk_norm: bool = False
    """Whether queries and keys have a norm per head."""
    qk_norm_whole: bool = False
    """Whether the norm of qk_norm is over all heads together (OLMo 2)."""
    pre_norm: bool = True
    """Whether a norm precedes each half of a block; without it, post_norm is needed (OLMo 2)."""
    post_norm: bool = False
    """Whether a second norm follows each half of a block (Gemma 2)."""
    unit_offset_norm: bool = False
    """Whether norm scales are stored minus one (Gemma)."""
    scaled_embedding: bool = False
    """Whether embeddings are multiplied by the square root of the width (Gemma)."""
    attention_soft_cap: float | None = None
    """Soft cap of attention scores, cap x tanh(score / cap); null for none."""
    attention_sinks: bool = False
    """Whether the softmax of every query head has an additional learned logit without a key (gpt-oss)."""
    logit_soft_cap: float | None = None
    """Soft cap of the logits; null for none."""
    attention_scale: float | None = None
    """Factor on the attention scores; null takes head_dim ** -0.5."""
    latent: LatentConfig = LatentConfig()
    window: int | None = None
    """Tokens that a layer with a window attends to, itself included; null for none."""
    window_pattern: str = "LG"
    """Layers with the window (`L`, local) and without (`G`, global), repeated over the depth: `LG` starts with a local
    layer (Gemma 2), `LLLLLG` (Gemma 3), `L` for all layers (Mistral)."""
    init_scale: float = 0.02
    """Standard deviation of initial weights; of projections out of attention and MLP it is divided by the square root
    of twice the layers (GPT-2). Widths below 1000 learn faster from about 1 / sqrt(width)."""
    mtp_layers: int = 0
    """Number of further tokens that training predicts (multi-token prediction, DeepSeek-V3). Each is predicted by an
    additional last layer, with the embedding and output projection of the model. Evaluation and sampling do not use
    these layers."""
    mtp_loss: float = 0.3
    """Factor of the mean loss of these predictions. The reported loss does not include it."""
    experts: int | None = None
    """Experts of every MLP (E), each with `mlp_dim` hidden features; null for a dense MLP."""
    experts_per_token: int = 2
    """Experts that compute a token (K)."""
    router: str = "softmax"
    """How scores of all experts are computed from the router's logits: `softmax` or `sigmoid`. A token chooses experts
    by score."""
    router_normalized: bool = True
    """Whether the scores of the chosen experts are divided by their sum, which with softmax is a softmax over the
    chosen experts."""
    router_scale: float = 1.0
    """Factor on the weights of the chosen experts."""
    router_groups: int = 1
    """Number of groups of consecutive experts, such as those of one node; a token chooses experts of the best groups
    only."""
    router_best_groups: int = 1
    """Number of groups whose experts a token may choose: those with the highest score, or with `sigmoid` the highest
    sum of two scores."""
    shared_experts: int = 0
    """Number of experts that compute every token, in addition to the chosen ones."""
    dense_layers: int = 0
    """Number of first layers that have a dense MLP instead of experts."""
    dense_mlp_dim: int | None = None
    """Hidden features of the MLP of these layers."""
    balance_loss: float = 0.0
    """Factor of the loss E x sum over experts of (share of the choices) x (mean share of the scores), a mean over the
    layers and tokens of a microbatch, which is 1 if the load is even. The reported loss does not include it. 0 for
    none."""
    router_z_loss: float = 0.0
    """Factor of the mean of logsumexp(router logits) squared, which keeps these small; 0 for none."""
    balance_rate: float = 0.0
    """Change per step of a bias that is added to the scores when experts are chosen: up for experts with less than the
    mean load, down for others (balance without a loss). 0 for none."""
    expert_capacity: float | None = None
    """Largest number of tokens of an expert, relative to the mean per expert of a microbatch; the expert does not
    compute later tokens. Null computes all."""

    def __post_init__(self):
        for field, choices in CHOICES.items():
            if getattr(self, field) not in choices:
                raise ValueError(
                    f"model.{field}={getattr(self, field)!r} is unknown. Choose one of {', '.join(choices)}."
                )
        for field in SIZES:
            value = getattr(self, field)
            if value is not None and value < 1:
                advice = " Type model.experts=null for a dense MLP." if field == "experts" else ""
                raise ValueError(f"model.{field}={value} must be at least 1.{advice}")
        if self.head_dim is None and self.width % self.heads:
            raise ValueError(
                f"model.width={self.width} does not divide into {self.heads} heads. "
                "Set model.heads to a divisor of the width, or model.head_dim."
            )
        for field, value in self._automatic_sizes().items():
            if getattr(self, field) is None:
                object.__setattr__(self, field, value)
        if self.heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_kv_heads={self.num_kv_heads} does not divide model.heads={self.heads}. "
                f"Choose one of {[k for k in range(1, self.heads + 1) if self.heads % k == 0]}."
            )
        for field in POSITIVE:
            if (value := getattr(self, field)) is not None and not value > 0:
                advice = f" Type model.{field}=null for none." if getattr(ModelConfig, field) is None else ""
                raise ValueError(f"model.{field}={value} must be above 0.{advice}")
        self._check_rotary()
        self._check_experts()
        self._check_latent()
        self._check_mtp()
        if self.activation in GATES and not self.gated:
            raise ValueError(f"model.activation={self.activation} has two projections. Type model.gated=true.")
        if not set(self.window_pattern) <= set("LG") or not self.window_pattern:
            raise ValueError(
                f"model.window_pattern={self.window_pattern!r} is unknown. Type letters L and G, such as LG."
            )
        if not self.pre_norm and (self.parallel_block or not self.post_norm):
            raise ValueError("model.pre_norm=false needs model.post_norm=true and model.parallel_block=false.")

    def _check_rotary(self) -> None:
        check_scaling(self.rotary_scaling)
        if not 0 < self.rotary_fraction <= 1:
            raise ValueError(f"model.rotary_fraction={self.rotary_fraction} is not above 0 and up to 1.")
        width = rotated_width(self.head_dim, self.rotary_fraction)
        if self.position == "rotary" and not self.latent.key_rank and (width % 2 or not width):
            part = f"rotary_fraction={self.rotary_fraction} of " if self.rotary_fraction < 1 else ""
            raise ValueError(
                f"Rotary positions need an even number of features, 2 or more, not {width}: {part}head_dim="
                f"{self.head_dim}. Set model.head_dim{' or model.rotary_fraction' if part else ''}."
            )

    def _check_latent(self) -> None:
        if not self.latent.key_rank:
            if self.latent != LatentConfig():
                raise ValueError(
                    "model.latent has no effect without model.latent.key_rank. Type model.latent.key_rank=512."
                )
            return
        self.latent.check(self.heads, self.num_kv_heads, self.head_dim)
        wanted = {
            "position": "rotary",
            "bias": "none",
            "qk_norm": False,
            "rotary_fraction": 1.0,
            "attention_sinks": False,
        }
        for field, value in wanted.items():
            if getattr(self, field) != value:
                raise ValueError(
                    f"model.{field}={getattr(self, field)} does not work with latent attention. Type "
                    f"model.{field}={str(value).lower()}, or model.latent.key_rank=null."
                )

    def _check_mtp(self) -> None:
        if self.mtp_layers < 0 or self.mtp_loss <= 0:
            raise ValueError(
                f"model.mtp_layers={self.mtp_layers} with model.mtp_loss={self.mtp_loss}: type a number of further "
                "tokens, 0 for none, and a factor above 0."
            )
        if not self.mtp_layers and self.mtp_loss != ModelConfig.mtp_loss:
            raise ValueError(
                f"model.mtp_loss={self.mtp_loss} has no effect without model.mtp_layers. Type model.mtp_layers=1."
            )

    def _check_experts(self) -> None:
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        if self.experts is None:
            for field in EXPERT_FIELDS:
                if getattr(self, field) != defaults[field]:
                    raise ValueError(
                        f"model.{field}={getattr(self, field)} has no effect: the MLP is dense. Remove it, or type "
                        "model.experts=8."
                    )
            return
        if not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(
                f"model.experts_per_token={self.experts_per_token} is not from 1 to the {self.experts} experts. Type "
                f"model.experts_per_token={min(2, max(self.experts, 1))}."
            )
        self._check_groups()
        if self.dense_mlp_dim and self.dense_layers >= self.layers:
            raise ValueError(
                f"model.dense_layers={self.dense_layers} leaves no layer with experts. Type model.layers="
                f"{self.dense_layers + 1} or more, or model.dense_layers=0 model.dense_mlp_dim=null."
            )
        if self.dense_layers < 0 or bool(self.dense_layers) != bool(self.dense_mlp_dim):
            raise ValueError(
                f"model.dense_layers={self.dense_layers} with model.dense_mlp_dim={self.dense_mlp_dim}: type a number "
                f"of layers below {self.layers} and their hidden features, or 0 and null."
            )
        if self.shared_experts < 0:
            raise ValueError(f"model.shared_experts={self.shared_experts} is negative. Type 0 for none.")
        if self.router_scale <= 0:
            raise ValueError(f"model.router_scale={self.router_scale} must be above 0. Type 1 for no scaling.")
        for field in BALANCE_FIELDS:
            if getattr(self, field) < 0:
                raise ValueError(f"model.{field}={getattr(self, field)} is negative. Type 0 for none.")
        if self.expert_capacity is not None and self.expert_capacity <= 0:
            raise ValueError(f"model.expert_capacity={self.expert_capacity} must be above 0. Type null for no limit.")
        if self.bias == "all" and self.expert_capacity is not None:
            raise ValueError(
                f"model.expert_capacity={self.expert_capacity} does not drop the biases of experts. Type "
                "model.expert_capacity=null, or model.bias=attention."
            )

    def _check_groups(self) -> None:
        groups, best, experts = self.router_groups, self.router_best_groups, self.experts or 1
        most = max(1, experts // 2) if self.router == "sigmoid" else experts  # its groups are scored by two experts
        fits = [n for n in range(1, most + 1) if experts % n == 0]
        if groups not in fits:
            raise ValueError(
                f"model.router_groups={groups} does not divide {experts} experts into groups"
                f"{' of two or more' if self.router == 'sigmoid' else ''}. Choose one of {fits}."
            )
        fewest = math.ceil(self.experts_per_token * groups / experts)
        if not fewest <= best <= groups:
            raise ValueError(
                f"model.router_best_groups={best} is not from {fewest}, whose experts are enough for experts_per_token="
                f"{self.experts_per_token}, to the {groups} groups. Type model.router_best_groups={groups}."
            )

    @property
    def first_layers(self) -> "ModelConfig":
        """The model whose layers are the first, dense ones of this model."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        dense = {field: defaults[field] for field in EXPERT_FIELDS}
        return dataclasses.replace(self, experts=None, mlp_dim=self.dense_mlp_dim, **dense)

    @property
    def value_dim(self) -> int:
        """Features of a value per head."""
        return self.latent.value_dim if self.latent.key_rank else self.head_dim

    @property
    def later_layers(self) -> "ModelConfig":
        """The model whose layers are those behind the first, dense ones."""
        return dataclasses.replace(self, dense_layers=0, dense_mlp_dim=None) if self.dense_layers else self

    @functools.cached_property
    def layer_groups(self) -> tuple[tuple["ModelConfig", int], ...]:
        """Groups of equal layers in order: a model whose layers are all of that kind, and their number."""
        first = ((self.first_layers, self.dense_layers),) if self.dense_layers else ()
        return (*first, (self.later_layers, self.layers - self.dense_layers))

    @property
    def routing(self) -> RouterConfig | None:
        """How tokens choose experts; None for a dense MLP. Losses are means over layers."""
        if self.experts is None:
            return None
        layers = self.layers - self.dense_layers
        return RouterConfig(
            self.experts, self.experts_per_token, self.router, self.router_normalized, self.router_scale,
            self.balance_loss / layers, self.router_z_loss / layers, self.expert_capacity,
            (self.router_groups, self.router_best_groups),
        )  # fmt: skip

    def _automatic_sizes(self) -> dict[str, int]:
        """Values of the sizes that are null."""
        return {"num_kv_heads": self.heads, "head_dim": self.width // self.heads, "mlp_dim": 4 * self.width}

    def resized(self, **sizes: Any) -> "ModelConfig":
        """A copy with other sizes, such as `model.resized(width=512)`; derived sizes follow.

        `dataclasses.replace` keeps `num_kv_heads`, `head_dim` and `mlp_dim` of this model. Here each of them that has
        its automatic value is computed again from the new width and heads, unless `sizes` gives it.
        """
        automatic = self._automatic_sizes()
        derived = {name: None for name, value in automatic.items() if getattr(self, name) == value}
        return dataclasses.replace(self, **{**derived, **sizes})

    @property
    def is_local(self) -> tuple[bool, ...]:
        """Whether each layer has the window."""
        pattern = self.window_pattern if self.window else "G"
        return tuple(pattern[i % len(pattern)] == "L" for i in range(self.layers))

    @property
    def known_vocab_size(self) -> int:
        """`vocab_size`; raises ValueError if it is left to the tokenizer."""
        if self.vocab_size is None:
            raise ValueError(
                f"model {self.name} takes its vocabulary from the tokenizer, so its size is not known yet. "
                "Set model.vocab_size."
            )
        return self.vocab_size
