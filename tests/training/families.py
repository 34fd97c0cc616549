"""Tiny models of the families that parity is measured with."""

from mstrain.models.config import ModelConfig
from mstrain.models.latent import LatentConfig

SEQ, VOCABULARY = 16, 61  # the vocabulary divides over no mesh
# Layers that do not divide evenly over two or three stages, and experts.
FAMILIES = {
    "gpt2": ModelConfig("gpt2", layers=5, width=32, heads=4, mlp_dim=64, vocab_size=VOCABULARY, context=SEQ),
    "llama": ModelConfig(
        "llama", layers=4, width=32, heads=4, num_kv_heads=2, mlp_dim=64, vocab_size=VOCABULARY, norm="rmsnorm",
        position="rotary", activation="silu", gated=True, bias="none", tied=False,
    ),
    "gemma": ModelConfig(
        "gemma", layers=3, width=32, heads=4, num_kv_heads=2, mlp_dim=64, vocab_size=VOCABULARY, norm="rmsnorm",
        position="rotary", activation="gelu_tanh", gated=True, bias="none", post_norm=True, unit_offset_norm=True,
        scaled_embedding=True, attention_soft_cap=50.0, logit_soft_cap=30.0, window=6, window_pattern="LG",
    ),
    "mixtral": ModelConfig(
        "mixtral", layers=2, width=32, heads=8, num_kv_heads=4, mlp_dim=48, vocab_size=VOCABULARY, norm="rmsnorm",
        position="rotary", activation="silu", gated=True, bias="none", tied=False, experts=4, balance_loss=0.02,
        router_z_loss=1e-3, balance_rate=1e-3,
    ),
    "skewed": ModelConfig(
        "skewed", layers=2, width=32, heads=8, num_kv_heads=4, mlp_dim=48, vocab_size=VOCABULARY, norm="rmsnorm",
        position="rotary", activation="silu", gated=True, bias="none", tied=False, experts=4,
    ),
    "gpt_oss": ModelConfig(
        "gpt_oss", layers=4, width=32, heads=8, num_kv_heads=4, mlp_dim=48, vocab_size=VOCABULARY, norm="rmsnorm",
        position="rotary", rotary_scaling="yarn:8:2:0.5:32:1.2", activation="clamped_swiglu", gated=True, bias="all",
        tied=False, attention_sinks=True, window=6, experts=4, balance_loss=0.02,
    ),
    "deepseek": ModelConfig(
        "deepseek", layers=3, width=32, heads=8, head_dim=10, mlp_dim=24, vocab_size=VOCABULARY, norm="rmsnorm",
        position="rotary", activation="silu", gated=True, bias="none", tied=False, experts=8, router="sigmoid",
        latent=LatentConfig(key_rank=20, query_rank=24, rotary_dim=4, value_dim=6), router_groups=4,
        router_best_groups=2, shared_experts=2, dense_layers=1, dense_mlp_dim=48, balance_loss=0.02, balance_rate=1e-3,
    ),
}  # fmt: skip
