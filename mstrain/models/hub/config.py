"""ModelConfig from the config.json of a Hugging Face folder, and config.json from a ModelConfig."""

import dataclasses
import difflib
import math
from typing import Any

from mstrain.models.config import EXPERT_FIELDS, TRAINING_FIELDS, ModelConfig
from mstrain.models.hub.families import FAMILIES, LATENT, NEUTRAL, Family
from mstrain.models.hub.quantized import check_quantization
from mstrain.models.hub.reader import Reader
from mstrain.models.hub.rotary import ALL, LOCAL, magnitude, rotary_of, write_rotary
from mstrain.models.latent import LatentConfig

ACTIVATIONS = {
    "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "silu": "silu", "swish": "silu",
    "relu": "relu",
}  # fmt: skip
REQUIRED = "layers width heads vocab_size norm_epsilon experts experts_per_token router_scale".split()
_NUMBERS = {
    "norm_epsilon": float, "logit_soft_cap": float, "attention_soft_cap": float, "tied": bool,
    "router_normalized": bool, "router_scale": float,
}  # fmt: skip


def language_model(config: Any) -> Any:
    """The part of a config.json that describes the language model of a model with a vision tower (Gemma 3)."""
    inner = config.get("text_config") if isinstance(config, dict) and config.get("model_type") == "gemma3" else None
    if not isinstance(inner, dict):
        return config
    outer = {key: config[key] for key in ("quantization_config",) if key in config}
    return {"architectures": [FAMILIES["gemma3_text"].architecture], **inner, **outer, "model_type": "gemma3_text"}


def model_of(config: Any, name: str) -> tuple[Family, ModelConfig]:
    """The family and the architecture that a config.json describes; `name` becomes the name of the model.

    Raises ValueError for a model that mstrain does not have, with the key and value that it lacks.
    """
    family = _family_of(config)
    for alias, key in family.aliases.items():
        if alias in config:
            if config.get(key, config[alias]) != config[alias]:
                raise ValueError(f"{key}={config[key]!r} and {alias}={config[alias]!r} differ")
            config = {key: config[alias], **{name: config[name] for name in config if name != alias}}
    reader = Reader(config, family)
    check_quantization(config.get("quantization_config"), family.quantized)
    for key, value in (NEUTRAL | family.required).items():
        if key not in family.read and (config.get(key, value) or None) != (value or None):
            raise ValueError(f"{key}={config[key]!r} is not supported for {family.model_type}")
    fields = {field: _value(reader, field, key) for field, key in family.keys.items()}
    for field in REQUIRED:
        if field in fields and fields[field] is None:
            raise ValueError(f"{family.keys[field]} is missing")
    if fields.get("context") is None:
        fields.pop("context")
    fields["tied"] = bool(fields["tied"])
    fields |= {"norm_bias": family.fixed["norm"] == "layernorm", "bias": _bias(reader)}
    fields |= _windows(reader, fields["layers"])
    if family.fixed["position"] == "rotary":
        fields |= rotary_of(reader, local=fields.get("window") is not None)
        _check_padding(reader, fields["vocab_size"])
    if fields["norm_epsilon"] < 0:
        raise ValueError(f"{family.keys['norm_epsilon']}={fields['norm_epsilon']} is negative")
    fields |= _attention_scale(reader, fields)
    if family.latent:
        fields |= _latent(reader)
        if fields["dense_layers"] >= fields["layers"]:
            fields = {field: value for field, value in fields.items() if field not in (*EXPERT_FIELDS, "experts")} | {
                "mlp_dim": fields["dense_mlp_dim"]
            }
            family = family.all_dense
    return family, ModelConfig(name=name, **{**fields, **family.fixed})


def config_of(model: ModelConfig, family: Family) -> dict[str, Any] | None:
    """The config.json of `model` as a model of `family`; None if the family has no such model."""
    if family.latent and not model.experts:
        family = family.all_dense
    if bool(model.experts) != ("experts" in family.keys):
        return None
    inverse = {}
    for field, key in family.keys.items():
        inverse[key] = getattr(model, field)
    if "activation" in family.keys:
        names = {"gelu_tanh": family.activation, **{name: name for name in ("gelu", "silu", "relu")}}
        inverse[family.keys["activation"]] = names.get(model.activation)
    if bool(model.latent.key_rank) != family.latent:
        return None
    if family.latent:
        inverse |= _write_latent(model, family)
    elif "head_dim" not in family.keys and model.heads * model.head_dim != model.width:
        return None
    config = {"model_type": family.model_type, "architectures": [family.architecture], **inverse}
    config |= family.bias.get(model.bias, {}) | _write_windows(model, family)
    if family.fixed["position"] == "rotary":
        config |= write_rotary(model, family)
    if "query_pre_attn_scalar" in family.defaults:
        scalar = (model.attention_scale or model.head_dim**-0.5) ** -2
        config["query_pre_attn_scalar"] = round(scalar)
    try:
        _, same = model_of(config, model.name)
    except ValueError:
        return None
    return None if differing_fields(model, same) else config


def family_for(model: ModelConfig) -> tuple[Family, dict[str, Any]]:
    """The first family that has `model`, and its config.json. Raises ValueError if no family has."""
    for family in FAMILIES.values():
        if config := config_of(model, family):
            return family, config
    raise ValueError(
        f"model {model.name}: no supported architecture of transformers has position={model.position}, "
        f"norm={model.norm}, activation={model.activation}, gated={model.gated}, bias={model.bias}, "
        f"parallel_block={model.parallel_block} together. Known: {', '.join(FAMILIES)}."
    )


def _latent(reader: Reader) -> dict[str, Any]:
    """Fields of a model with latent attention, whose keys other families do not have."""
    of = {field: reader.get(key, bool if field == "alternating" else int) for key, field in LATENT.items() if field}
    of["alternating"] = of["alternating"] is not False
    if not of["alternating"] and "rope_interleave" not in reader.family.defaults:  # transformers would ignore it
        raise ValueError(f"rope_interleave=False is not supported for {reader.family.model_type}")
    plain = reader.get("qk_nope_head_dim", int)
    if plain is None or None in (of["key_rank"], of["rotary_dim"], of["value_dim"]):
        raise ValueError(f"one of {', '.join(LATENT)} is missing")
    found = {"latent": LatentConfig(**of), "head_dim": plain + of["rotary_dim"]}
    found["shared_experts"] = reader.get("n_shared_experts", int) or 0  # null in DeepSeek's own code
    groups = reader.get("n_group", int) or 1
    method = reader.get("topk_method", str)
    if method == "greedy":  # of DeepSeek-V2, with one group
        groups = 1
    elif reader.family.model_type == "deepseek_v2" and method != "group_limited_greedy":
        raise ValueError(
            f"topk_method={method} is not supported for deepseek_v2. Supported: greedy, group_limited_greedy"
        )
    best = reader.get("topk_group", int) if groups > 1 else 1
    if best is None:
        raise ValueError("topk_group is missing")
    found |= {"router_groups": groups, "router_best_groups": best}
    if not reader.get("first_k_dense_replace", int):
        found |= {"dense_layers": 0, "dense_mlp_dim": None}
    rope = reader.get("rope_scaling", dict) or reader.get("rope_parameters", dict) or {}
    all_scale = Reader(rope, reader.family).get("mscale_all_dim", float)
    if all_scale and rope.get("rope_type", rope.get("type", "default")) != "default":
        found["attention_scale"] = found["head_dim"] ** -0.5 * magnitude(rope["factor"], all_scale) ** 2
    return found


def _write_latent(model: ModelConfig, family: Family) -> dict[str, Any]:
    of = {key: getattr(model.latent, field) for key, field in LATENT.items() if field}
    method = "noaux_tc" if family.model_type == "deepseek_v3" else "greedy"
    if model.router_groups > 1 and method == "greedy":
        method = "group_limited_greedy"
    dense = {}
    if not model.experts:
        dense = {"first_k_dense_replace": model.layers}
    elif not model.dense_layers:
        dense = {"intermediate_size": 4 * model.width}
    return of | dense | {"topk_method": method, "qk_nope_head_dim": model.head_dim - model.latent.rotary_dim}


def differing_fields(one: ModelConfig, other: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """{field: (value in one, value in other)} of all fields that change the function that the models compute."""
    pairs = {field.name: (getattr(one, field.name), getattr(other, field.name)) for field in dataclasses.fields(one)}
    unused = {"name", *TRAINING_FIELDS}
    if one.position == other.position != "learned":
        unused.add("context")
    if one.position == other.position != "rotary":
        unused |= {"rotary_base", "rotary_fraction", "rotary_scaling"}
    if not (one.window or other.window):
        unused |= {"window_pattern", "local_rotary_base"}
    if not (one.experts or other.experts):
        unused |= set(EXPERT_FIELDS)
    if one.is_local == other.is_local:
        unused.add("window_pattern")
    return {name: pair for name, pair in pairs.items() if name not in unused and not _same(name, *pair, one)}


def _same(name: str, a: Any, b: Any, model: ModelConfig) -> bool:
    if name == "attention_scale":
        a, b = a or model.head_dim**-0.5, b or model.head_dim**-0.5
    numbers = all(isinstance(x, int | float) for x in (a, b))
    return math.isclose(a, b, rel_tol=1e-6) if numbers else a == b


def _family_of(config: Any) -> Family:
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ValueError("model_type is missing")
    name = config["model_type"]
    if name not in FAMILIES:
        near = difflib.get_close_matches(name, FAMILIES, 1)
        hint = f" The nearest is {near[0]}." if near else ""
        raise ValueError(f"model_type={name} is not supported.{hint} Supported: {', '.join(FAMILIES)}")
    return FAMILIES[name]


def _value(reader: Reader, field: str, key: str) -> Any:
    if field != "activation":
        return reader.get(key, _NUMBERS.get(field, int), 1e-6 if field == "norm_epsilon" else None)
    name = reader.get(key, str, "silu")
    if name not in ACTIVATIONS:
        raise ValueError(f"{key}={name} is not supported. Supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _bias(reader: Reader) -> str:
    keys = {key for choice in reader.family.bias.values() for key in choice}
    given = {key: bool(reader.get(key, bool, False)) for key in keys}
    for name, choice in reader.family.bias.items():
        if choice == given:
            return name
    raise ValueError(f"{', '.join(f'{key}={value}' for key, value in sorted(given.items()))} is not supported")


def _check_padding(reader: Reader, vocab_size: int) -> None:
    """Raises ValueError for a padding token that the table does not have: transformers could not load an export."""
    padding = reader.get("pad_token_id", int)
    if padding is not None and not -vocab_size <= padding < vocab_size:
        raise ValueError(f"pad_token_id={padding} is not one of the {vocab_size} tokens of vocab_size")


def _windows(reader: Reader, layers: int) -> dict[str, Any]:
    kind, types = reader.family.window, _layer_types(reader, layers)
    asked = kind not in ("asked", "last") or reader.get("use_sliding_window", bool, False)
    window = reader.get("sliding_window", int) if asked and kind != "none" else None
    if kind in ("none", "all", "asked") and types and set(types) != {"G" if window is None else "L"}:
        raise ValueError(f"layer_types is not supported for {reader.family.model_type}")
    if window is None:
        return {}
    if window < 1:
        raise ValueError(f"sliding_window={window} must be at least 1")
    if kind == "asked" and (first := reader.get("max_window_layers", int)):  # read by transformers 4, not by 5
        raise ValueError(f"max_window_layers={first} is not supported for {reader.family.model_type}")
    if types:
        pattern = types
    elif kind == "last":
        first = reader.get("max_window_layers", int, 28) or 0
        pattern = "G" * min(first, layers) + "L" * (layers - first)
    elif "sliding_window_pattern" in reader.family.defaults:
        every = reader.get("sliding_window_pattern", int) or 0
        if every < 1:
            raise ValueError(f"sliding_window_pattern={every} must be at least 1")
        pattern = "L" * (every - 1) + "G"
    else:
        pattern = reader.family.pattern
    return {"window": window, "window_pattern": _shortest(pattern)} if "L" in pattern[:layers] else {}


def _layer_types(reader: Reader, layers: int) -> str | None:
    """`layer_types` as a letter of each layer; None where config.json has none."""
    types = reader.config.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or not all(name in (LOCAL, ALL) for name in types) or len(types) != layers:
        raise ValueError(f"layer_types must have {layers} entries, each {LOCAL} or {ALL}")
    return "".join("L" if name == LOCAL else "G" for name in types)


def _shortest(pattern: str) -> str:
    """The shortest prefix of `pattern` that repeats to it."""
    lengths = range(1, len(pattern) + 1)
    return next(pattern[:n] for n in lengths if all(x == pattern[i % n] for i, x in enumerate(pattern)))


def _write_windows(model: ModelConfig, family: Family) -> dict[str, Any]:
    if family.window == "none":
        return {}
    config: dict[str, Any] = {"sliding_window": model.window}
    if family.window not in ("all", "asked"):
        config["layer_types"] = [LOCAL if local else ALL for local in model.is_local]
    if family.window in ("asked", "last"):
        config["use_sliding_window"] = any(model.is_local)
    if family.window == "last":
        config["max_window_layers"] = model.is_local.index(True) if any(model.is_local) else model.layers
    if family.window == "types" and model.window is None:
        config["sliding_window"] = model.context
    return config


def _attention_scale(reader: Reader, fields: dict[str, Any]) -> dict[str, Any]:
    if "query_pre_attn_scalar" not in reader.family.defaults:
        return {}
    scalar = reader.get("query_pre_attn_scalar", float)
    if not scalar or scalar < 0:
        raise ValueError(f"query_pre_attn_scalar={scalar} must be above 0")
    return {} if scalar == fields["head_dim"] else {"attention_scale": scalar**-0.5}
