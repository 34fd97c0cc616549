"""The families of Hugging Face models: names of tensors, keys of config.json, and what a family always has.

A family is a table and serves both directions. `modules` maps a module of the canonical parameters to the modules of
transformers that hold it, side by side along the last canonical dim; `.weight` and `.bias` follow from the leaf.
Kernels are transposed, because `torch.nn.Linear` stores [out, in].
"""

import dataclasses
from typing import Any

from mstrain.models.config import EXPERT_FIELDS

_SIZES = {
    "layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads", "head_dim": "head_dim", "mlp_dim": "intermediate_size",
    "vocab_size": "vocab_size", "context": "max_position_embeddings", "norm_epsilon": "rms_norm_eps",
    "tied": "tie_word_embeddings", "activation": "hidden_act",
}  # fmt: skip
_MODULES = {
    "embedding": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
    "blocks_0/attention_norm": "model.layers.{}.input_layernorm",
    "blocks_0/attention/qkv": "model.layers.{0}.self_attn.q_proj model.layers.{0}.self_attn.k_proj "
    "model.layers.{0}.self_attn.v_proj",
    "blocks_0/attention/q_scale": "model.layers.{}.self_attn.q_norm",
    "blocks_0/attention/k_scale": "model.layers.{}.self_attn.k_norm",
    "blocks_0/attention/out": "model.layers.{}.self_attn.o_proj",
    "blocks_0/mlp_norm": "model.layers.{}.post_attention_layernorm",
    "blocks_0/mlp/up": "model.layers.{0}.mlp.gate_proj model.layers.{0}.mlp.up_proj",
    "blocks_0/mlp/down": "model.layers.{}.mlp.down_proj",
}
_POST_NORMS = {
    "blocks_0/attention_post_norm": "model.layers.{}.post_attention_layernorm",
    "blocks_0/mlp_norm": "model.layers.{}.pre_feedforward_layernorm",
    "blocks_0/mlp_post_norm": "model.layers.{}.post_feedforward_layernorm",
}
_EXPERTS = {
    "blocks_0/mlp/router": "model.layers.{}.mlp.gate",
    "blocks_0/mlp/up": "model.layers.{0}.mlp.experts.{1}.gate_proj model.layers.{0}.mlp.experts.{1}.up_proj",
    "blocks_0/mlp/down": "model.layers.{0}.mlp.experts.{1}.down_proj",
}
_ROUTED = ("blocks_0/mlp/router", "blocks_0/shared/up", "blocks_0/shared/down")
_MTP = {
    "mtp/embedding_norm": "model.layers.{}.enorm",
    "mtp/hidden_norm": "model.layers.{}.hnorm",
    "mtp/projection": "model.layers.{}.eh_proj",
    "mtp/norm": "model.layers.{}.shared_head.norm",
}
MTP_COPIES = {"embedding": "model.layers.{}.embed_tokens", "head": "model.layers.{}.shared_head.head"}
"""What layers that predict further tokens share with the model, and their folders repeat."""
MTP_KEYS = ("num_nextn_predict_layers", "num_mtp_layers")  # of config.json: the number of these layers
_CHOICE = {"experts": "num_experts", "experts_per_token": "num_experts_per_tok", "router_normalized": "norm_topk_prob"}
_LLAMA = {"norm": "rmsnorm", "norm_bias": False, "position": "rotary", "gated": True}
_GEMMA = {**_LLAMA, "post_norm": True, "unit_offset_norm": True, "scaled_embedding": True}
NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(
        "add_cross_attention alibi attention_chunk_size attention_multiplier attn_logit_softcapping clip_qkv "
        "final_logit_softcapping kv_lora_rank logit_scale multi_query n_routed_experts no_rope_layers num_experts "
        "num_kv_shared_layers num_local_experts parallel_attn per_layer_config qk_layernorm query_pre_attn_scalar "
        "rope_interleave use_bidirectional_attention use_parallel_residual use_qk_norm".split()
    ),
    "embedding_multiplier": 1, "is_causal": True, "logits_scaling": 1, "residual_multiplier": 1,
}  # fmt: skip
"""Keys of config.json that change the arithmetic of some model of transformers, each with the value that changes
nothing; a family that does not read one takes no other value."""
_GPT_OSS_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
_ATTENTION_BIAS = {"none": {"attention_bias": False}, "attention": {"attention_bias": True}}


LATENT = {
    "q_lora_rank": "query_rank", "kv_lora_rank": "key_rank", "qk_rope_head_dim": "rotary_dim",
    "v_head_dim": "value_dim", "rope_interleave": "alternating", "qk_nope_head_dim": None,
}  # fmt: skip
"""Keys of config.json -> fields of `ModelConfig.latent`; the last one is head_dim without rotary_dim."""


@dataclasses.dataclass(frozen=True)
class Family:
    """One `model_type` of transformers.

    Attributes:
      architecture: class of transformers that loads the folder.
      fixed: fields of ModelConfig that all models of the family have.
      modules: module of the canonical parameters -> modules of transformers, {} for the layer.
      keys: field of ModelConfig -> key of config.json with the same value.
      defaults: values of keys that config.json may omit.
      aliases: other names of keys -> key.
      required: values that keys of config.json must have where they are given; other values are not supported.
      bias: `bias` of ModelConfig -> the keys of config.json that say so.
      window: how layers with a window are given: `none`, `all` (sliding_window), `asked` (the same if
        use_sliding_window), `types` (layer_types) or `last` (layer_types, or those from max_window_layers on).
      pattern: `window_pattern` where config.json has no layer_types.
      activation: name in config.json of `gelu_tanh`.
      transposed: whether kernels are stored [out, in].
      dense: other `modules` of the first, dense layers of a model with experts.
      latent: whether it has latent attention: fields of `ModelConfig.latent` are read.
      tensors: canonical parameter -> the whole name of its tensor, {} for the layer. Those of experts hold all experts,
        and kernels are stored [in, out].
      alternating: whether columns of gate and up alternate in a tensor that holds both.
      quantized: quant_method of folders whose 4-bit tensors are read (`mstrain.models.hub.quantized`).
      mtp: `modules` of the layers that predict further tokens, besides those of their blocks; {} without such layers.
    """

    model_type: str
    architecture: str
    fixed: dict[str, Any]
    modules: dict[str, str] = dataclasses.field(default_factory=lambda: _MODULES)
    keys: dict[str, str] = dataclasses.field(default_factory=lambda: _SIZES)
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)
    required: dict[str, Any] = dataclasses.field(default_factory=dict)
    bias: dict[str, dict[str, bool]] = dataclasses.field(default_factory=lambda: _ATTENTION_BIAS)
    window: str = "none"
    pattern: str = "L"
    activation: str = "gelu_pytorch_tanh"
    transposed: bool = True
    tensors: dict[str, str] = dataclasses.field(default_factory=dict)
    dense: dict[str, str] = dataclasses.field(default_factory=dict)
    latent: bool = False
    alternating: bool = False
    quantized: str | None = None
    mtp: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def read(self) -> set[str]:
        """The keys of config.json that describe the architecture of this family."""
        bias = {key for choice in self.bias.values() for key in choice}
        return {*self.keys.values(), *self.defaults, *bias, *(LATENT if self.latent else ())}

    @property
    def all_dense(self) -> "Family":
        """The same of a model with latent attention whose layers are all dense."""
        no_experts = {name: value for name, value in self.modules.items() if name not in _ROUTED}
        keys = {field: key for field, key in self.keys.items() if field not in (*EXPERT_FIELDS, "experts")}
        return dataclasses.replace(
            self,
            fixed={field: value for field, value in self.fixed.items() if field not in EXPERT_FIELDS},
            modules=no_experts | self.dense, dense={}, tensors={}, keys=keys | {"mlp_dim": "intermediate_size"},
        )  # fmt: skip

    @property
    def prefix(self) -> str:
        """Prefix of the tensors of the base model, which a folder of the base model omits."""
        return self.modules["embedding"].split(".")[0] + "."


def _gemma(model_type: str, architecture: str, **changes) -> Family:
    defaults = {
        "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh", "head_dim": 256,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "sliding_window": 4096,
    }  # fmt: skip
    return Family(
        model_type, architecture,
        keys=_SIZES | {"activation": "hidden_activation", "logit_soft_cap": "final_logit_softcapping"}
        | changes.pop("keys", {}),
        modules=_MODULES | _POST_NORMS,
        defaults=defaults | changes.pop("defaults", {}),
        window="types",
        **changes,
    )  # fmt: skip


def _deepseek(model_type: str, architecture: str, **changes) -> Family:
    sizes = {field: key for field, key in _SIZES.items() if field not in ("head_dim", "mlp_dim")}
    attention = "model.layers.{0}.self_attn."
    return Family(
        model_type, architecture,
        modules={module: names for module, names in _MODULES.items() if "attention/" not in module} | _EXPERTS | {
            "blocks_0/attention/latents": f"{attention}q_a_proj {attention}kv_a_proj_with_mqa",
            "blocks_0/attention/queries_norm": f"{attention}q_a_layernorm",
            "blocks_0/attention/queries": f"{attention}q_b_proj",
            "blocks_0/attention/keys_norm": f"{attention}kv_a_layernorm",
            "blocks_0/attention/keys": f"{attention}kv_b_proj",
            "blocks_0/attention/out": f"{attention}o_proj",
            "blocks_0/shared/up": "model.layers.{0}.mlp.shared_experts.gate_proj "
            "model.layers.{0}.mlp.shared_experts.up_proj",
            "blocks_0/shared/down": "model.layers.{0}.mlp.shared_experts.down_proj",
        },
        dense={name: _MODULES[name] for name in ("blocks_0/mlp/up", "blocks_0/mlp/down")},
        keys=sizes | {
            "experts": "n_routed_experts", "experts_per_token": "num_experts_per_tok",
            "mlp_dim": "moe_intermediate_size",
            "shared_experts": "n_shared_experts", "dense_layers": "first_k_dense_replace",
            "dense_mlp_dim": "intermediate_size", "router_scale": "routed_scaling_factor", "router_groups": "n_group",
            "router_best_groups": "topk_group",
        } | changes.pop("keys", {}),
        required={"moe_layer_freq": 1, "pretraining_tp": 1} | changes.pop("required"),
        bias={"none": {"attention_bias": False}}, latent=True, **changes,
    )  # fmt: skip


_ALL = (
    Family(
        "gpt2", "GPT2LMHeadModel",
        fixed={"norm": "layernorm", "position": "learned", "bias": "all"},
        modules={
            "embedding": "transformer.wte", "positions": "transformer.wpe", "final_norm": "transformer.ln_f",
            "head": "lm_head",
            "blocks_0/attention_norm": "transformer.h.{}.ln_1",
            "blocks_0/attention/qkv": "transformer.h.{}.attn.c_attn",
            "blocks_0/attention/out": "transformer.h.{}.attn.c_proj", "blocks_0/mlp_norm": "transformer.h.{}.ln_2",
            "blocks_0/mlp/up": "transformer.h.{}.mlp.c_fc", "blocks_0/mlp/down": "transformer.h.{}.mlp.c_proj",
        },
        keys={
            "layers": "n_layer", "width": "n_embd", "heads": "n_head", "mlp_dim": "n_inner",
            "vocab_size": "vocab_size", "context": "n_positions", "norm_epsilon": "layer_norm_epsilon",
            "tied": "tie_word_embeddings", "activation": "activation_function",
        },
        defaults={"tie_word_embeddings": True, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
                  "n_inner": None},
        required={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
        bias={"all": {}}, activation="gelu_new", transposed=False,
    ),
    Family(
        "llama", "LlamaForCausalLM", fixed=_LLAMA,
        bias={name: {"attention_bias": name != "none", "mlp_bias": name == "all"}
              for name in ("none", "attention", "all")},
    ),
    Family(
        "mistral", "MistralForCausalLM", fixed=_LLAMA, bias={"none": {}}, window="all",
        defaults={"sliding_window": 4096, "num_key_value_heads": 8},
    ),
    Family(
        "qwen2", "Qwen2ForCausalLM", fixed=_LLAMA, bias={"qkv": {}}, window="last",
        defaults={"num_key_value_heads": 32},
    ),
    Family(
        "qwen3", "Qwen3ForCausalLM", fixed={**_LLAMA, "qk_norm": True}, window="last",
        defaults={"head_dim": 128, "num_key_value_heads": 32},
    ),
    _gemma(
        "gemma2", "Gemma2ForCausalLM", fixed=_GEMMA, pattern="LG",
        keys={"attention_soft_cap": "attn_logit_softcapping"},
        defaults={"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, "num_attention_heads": 8,
                  "num_key_value_heads": 4},
    ),
    _gemma(
        "gemma3_text", "Gemma3ForCausalLM", fixed={**_GEMMA, "qk_norm": True},
        defaults={"rope_theta": 1e6, "rope_local_base_freq": 1e4, "final_logit_softcapping": None,
                  "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208,
                  "max_position_embeddings": 131072, "sliding_window_pattern": 6},
    ),
    Family(
        "phi3", "Phi3ForCausalLM", fixed=_LLAMA, bias={"none": {}}, window="all",
        modules=_MODULES | {
            "blocks_0/attention/qkv": "model.layers.{}.self_attn.qkv_proj",
            "blocks_0/mlp/up": "model.layers.{}.mlp.gate_up_proj",
        },
        defaults={"sliding_window": None, "rms_norm_eps": 1e-5},
    ),
    Family(
        "olmo2", "Olmo2ForCausalLM",
        fixed={**_LLAMA, "qk_norm": True, "qk_norm_whole": True, "pre_norm": False, "post_norm": True},
        modules=_MODULES | _POST_NORMS, defaults={"rms_norm_eps": 1e-5},
    ),
    Family(
        "mixtral", "MixtralForCausalLM", fixed=_LLAMA, bias={"none": {}}, window="all",
        modules=_MODULES | {
            "blocks_0/mlp/router": "model.layers.{}.block_sparse_moe.gate",
            "blocks_0/mlp/up": "model.layers.{0}.block_sparse_moe.experts.{1}.w1 "
            "model.layers.{0}.block_sparse_moe.experts.{1}.w3",
            "blocks_0/mlp/down": "model.layers.{0}.block_sparse_moe.experts.{1}.w2",
        },
        keys=_SIZES | {"experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
        defaults={"sliding_window": None, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
                  "rms_norm_eps": 1e-5, "rope_theta": 1e6},
        required={"router_jitter_noise": 0.0},
    ),
    Family(
        "qwen3_moe", "Qwen3MoeForCausalLM", fixed={**_LLAMA, "qk_norm": True}, window="asked",
        modules=_MODULES | _EXPERTS, keys=_SIZES | _CHOICE | {"mlp_dim": "moe_intermediate_size"},
        defaults={"num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
                  "norm_topk_prob": False},
        aliases={"num_local_experts": "num_experts"}, required={"decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    Family(
        "olmoe", "OlmoeForCausalLM", fixed={**_LLAMA, "qk_norm": True, "qk_norm_whole": True},
        modules=_MODULES | _EXPERTS, keys=_SIZES | _CHOICE,
        defaults={"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False, "rms_norm_eps": 1e-5},
        aliases={"num_local_experts": "num_experts"},
    ),
    Family(
        "gpt_oss", "GptOssForCausalLM",
        fixed={**_LLAMA, "attention_sinks": True, "activation": "clamped_swiglu"},
        modules=_MODULES | {"blocks_0/mlp/router": "model.layers.{}.mlp.router"},
        tensors={
            "blocks_0/attention/sinks": "model.layers.{}.self_attn.sinks",
            "blocks_0/mlp/router_bias": "model.layers.{}.mlp.router.bias",
            "blocks_0/mlp/up/kernel": "model.layers.{}.mlp.experts.gate_up_proj",
            "blocks_0/mlp/up_bias": "model.layers.{}.mlp.experts.gate_up_proj_bias",
            "blocks_0/mlp/down/kernel": "model.layers.{}.mlp.experts.down_proj",
            "blocks_0/mlp/down_bias": "model.layers.{}.mlp.experts.down_proj_bias",
        },
        keys={key: name for key, name in _SIZES.items() if key != "activation"}
        | {"experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
        defaults={"head_dim": 64, "num_key_value_heads": 8, "num_experts_per_tok": 4, "sliding_window": 128,
                  "rms_norm_eps": 1e-5, "attention_bias": True, "rope_theta": 150000.0,
                  "rope_parameters": _GPT_OSS_ROPE},
        aliases={"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
        required={"hidden_act": "silu", "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        bias={"all": {"attention_bias": True}}, window="types", pattern="LG", alternating=True, quantized="mxfp4",
    ),
    _deepseek(
        "deepseek_v2", "DeepseekV2ForCausalLM", fixed={**_LLAMA, "router_normalized": False},
        required={"scoring_func": "softmax", "norm_topk_prob": False, "mlp_bias": False},
        defaults={"first_k_dense_replace": 0, "kv_lora_rank": 512, "q_lora_rank": 1536, "n_routed_experts": 64,
                  "n_shared_experts": 2, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
                  "routed_scaling_factor": 1.0, "moe_intermediate_size": 1407, "topk_method": "greedy",
                  "hidden_size": 4096, "intermediate_size": 11008},
    ),
    _deepseek(
        "deepseek_v3", "DeepseekV3ForCausalLM", fixed={**_LLAMA, "router": "sigmoid"},
        keys={"router_normalized": "norm_topk_prob"},
        tensors={"blocks_0/mlp/balance": "model.layers.{}.mlp.gate.e_score_correction_bias"},
        required={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        defaults={"first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536, "n_routed_experts": 256,
                  "n_shared_experts": 1, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
                  "routed_scaling_factor": 2.5, "moe_intermediate_size": 2048, "n_group": 8, "topk_group": 4,
                  "norm_topk_prob": True, "num_experts_per_tok": 8, "rope_interleave": True, "hidden_size": 7168,
                  "intermediate_size": 18432, "num_mtp_layers": 1},
        aliases={"num_nextn_predict_layers": "num_mtp_layers"}, mtp=_MTP,
    ),
    Family(
        "starcoder2", "Starcoder2ForCausalLM",
        fixed={"norm": "layernorm", "position": "rotary"},
        modules=_MODULES | {"blocks_0/mlp/up": "model.layers.{}.mlp.c_fc",
                            "blocks_0/mlp/down": "model.layers.{}.mlp.c_proj"},
        keys=_SIZES | {"norm_epsilon": "norm_epsilon"}, bias={"all": {"use_bias": True}, "none": {"use_bias": False}},
        window="all",
        defaults={"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "use_bias": True,
                  "norm_epsilon": 1e-5, "sliding_window": None, "num_key_value_heads": 2},
    ),
)  # fmt: skip
FAMILIES = {family.model_type: family for family in _ALL}
