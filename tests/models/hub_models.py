"""Tiny models of every family, made by transformers with random weights, biases and scales, and saved as folders."""

import json
import pathlib
import re

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

_SIZES = dict(
    vocab_size=61, hidden_size=32, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
    intermediate_size=48, max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
_LLAMA3 = dict(
    rope_type="llama3", rope_theta=500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip
_YARN = dict(
    rope_type="yarn", rope_theta=500.0, factor=8.0, beta_fast=2.0, beta_slow=0.5, truncate=False,
    original_max_position_embeddings=32,
)  # fmt: skip
_ROPE = dict(rope_type="default", rope_theta=500.0)
_GEMMA = _SIZES | dict(head_dim=8, sliding_window=4)
_LATENT = _SIZES | dict(
    num_key_value_heads=8, kv_lora_rank=20, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5,
    moe_intermediate_size=24, num_experts_per_tok=2,
)  # fmt: skip
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=61, n_embd=32, n_layer=4, n_head=8, n_positions=64, bos_token_id=None, eos_token_id=None
    ),
    "llama2": lambda: transformers.LlamaConfig(**_SIZES),
    "llama3": lambda: transformers.LlamaConfig(**_SIZES, rope_parameters=_LLAMA3, attention_bias=True, head_dim=8),
    "mistral": lambda: transformers.MistralConfig(**_SIZES, sliding_window=5),
    "qwen2": lambda: transformers.Qwen2Config(
        **_SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=1, tie_word_embeddings=True
    ),
    "qwen3": lambda: transformers.Qwen3Config(**_SIZES, head_dim=8),
    "gemma2": lambda: transformers.Gemma2Config(
        **_GEMMA, query_pre_attn_scalar=5, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **_GEMMA | dict(num_hidden_layers=8), final_logit_softcapping=3.0,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 900.0},
        },
    ),
    "phi3": lambda: transformers.Phi3Config(
        **_SIZES, sliding_window=6, rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)
    ),
    "olmo2": lambda: transformers.Olmo2Config(**_SIZES),
    "mixtral": lambda: transformers.MixtralConfig(
        **_SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=None, rope_parameters=_ROPE
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **_SIZES, head_dim=8, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True
    ),
    "olmoe": lambda: transformers.OlmoeConfig(**_SIZES, num_experts=4, num_experts_per_tok=2, norm_topk_prob=False),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **_SIZES, head_dim=8, num_local_experts=8, num_experts_per_tok=3, sliding_window=5, rope_parameters=_YARN
    ),
    "deepseek_v2": lambda: transformers.DeepseekV2Config(
        **_LATENT, n_routed_experts=4, n_shared_experts=2, q_lora_rank=None, first_k_dense_replace=1,
        rope_parameters=_YARN | dict(truncate=True, mscale=0.7, mscale_all_dim=0.7),
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **_LATENT, n_routed_experts=8, n_shared_experts=1, q_lora_rank=24, first_k_dense_replace=2, n_group=4,
        topk_group=2, routed_scaling_factor=1.5, num_mtp_layers=1,
        rope_parameters=_YARN | dict(truncate=True, mscale=1.0, mscale_all_dim=0.8),
    ),
    "deepseek_v3_dense": lambda: transformers.DeepseekV3Config(  # without a layer that has experts
        **_LATENT, q_lora_rank=24, first_k_dense_replace=4, num_mtp_layers=0, rope_parameters=_ROPE
    ),
    "starcoder2": lambda: transformers.Starcoder2Config(**_SIZES, sliding_window=None),
}  # fmt: skip


# Of an MtpModel, what it shares with its model, and the names of the copies in a folder.
COPIES = {"embed_tokens.weight": "embed_tokens.weight", "shared_head.weight": "shared_head.head.weight"}


def make(name: str, seed: int = 0):
    """The model of transformers in float32 with eager attention; every weight is random, norm scales about their
    usual value."""
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager")
    return _random(model, torch.Generator().manual_seed(seed))


def _random(model, draw: torch.Generator):
    with torch.no_grad():
        for name, weight in model.named_parameters():
            center = 1.0 if weight.ndim == 1 and bool((weight == 1).all()) else 0.0
            spread = 5.0 if name.endswith("gate_up_proj_bias") else 0.2  # some beyond the limits of gpt-oss
            weight.copy_(center + spread * torch.randn(weight.shape, generator=draw))
        for name, bias in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias.copy_(0.2 * torch.randn(bias.shape, generator=draw))
    return model.eval()


def save(name: str, folder: pathlib.Path, **options):
    """The model of `make`, saved in `folder`, and its layers that predict further tokens, or None without."""
    model = make(name)
    model.save_pretrained(folder, **options)
    if not getattr(model.config, "num_mtp_layers", 0):
        return model, None
    shared = {weight: weight.detach().clone() for weight in model.parameters()}
    further = _random(MtpModel(model, model.config.num_mtp_layers), torch.Generator().manual_seed(1))
    with torch.no_grad():
        for weight, value in shared.items():
            weight.copy_(value)
    _add(folder, as_published(further.state_dict(), model.config.num_hidden_layers))
    return model, further


def as_published(state: dict[str, torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
    """The tensors of an MtpModel by the names of DeepSeek's folders, for a model with so many layers."""
    found = {}
    for name, value in state.items():
        if name in COPIES:
            found[f"model.layers.{layers}.{COPIES[name]}"] = value.clone()  # of the first, as in DeepSeek-V3
            continue
        number, name = re.fullmatch(r"layers\.(\d+)\.(.*)", name).groups()
        name = name.replace("mtp_block.", "").replace("post_norm", "shared_head.norm")
        name = f"model.layers.{layers + int(number)}.{name}"
        if "mlp.experts." not in name:
            found[name] = value.contiguous()
            continue
        for expert, kernel in enumerate(value):
            parts = {"down": kernel} if name.endswith("down_proj") else dict(zip(("gate", "up"), kernel.chunk(2)))
            for part, own in parts.items():
                found[f"{name.rpartition('.')[0]}.{expert}.{part}_proj.weight"] = own.contiguous()
    return found


def _add(folder: pathlib.Path, tensors: dict[str, torch.Tensor]) -> None:
    index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index.is_file():
        return save_file(load_file(whole) | tensors, whole, metadata={"format": "pt"})
    save_file(tensors, folder / "further.safetensors", metadata={"format": "pt"})
    document = json.loads(index.read_text())
    document["weight_map"] |= dict.fromkeys(tensors, "further.safetensors")
    index.write_text(json.dumps(document))
