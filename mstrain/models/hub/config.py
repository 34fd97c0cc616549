"""ModelConfig from the config.json of a Hugging Face folder, and config.json from a ModelConfig."""

import dataclasses
import difflib
import math
from typing import Any

from mstrain.models.config import ModelConfig
from mstrain.models.hub.families import FAMILIES, Family

LOCAL, ALL = "sliding_attention", "full_attention"
ACTIVATIONS = {
    "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "silu": "silu", "swish": "silu",
    "relu": "relu",
}  # fmt: skip
_NUMBERS = {"norm_epsilon": float, "logit_soft_cap": float, "attention_soft_cap": float, "tied": bool}
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def language_model(config: Any) -> Any:
    """The part of a config.json that describes the language model of a model with a vision tower (Gemma 3)."""
    inner = config.get("text_config") if isinstance(config, dict) and config.get("model_type") == "gemma3" else None
    if not isinstance(inner, dict):
        return config
    return {"architectures": [FAMILIES["gemma3_text"].architecture], **inner, "model_type": "gemma3_text"}


class _Reader:
    """Values of a config.json; a missing key has the default of its family."""

    def __init__(self, config: dict[str, Any], family: Family):
        self.config, self.family = config, family

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """A value of type `kind` or None. Raises ValueError for another type."""
        value = self.config.get(key, self.family.defaults.get(key, default))
        if kind is float and type(value) is int:
            value = float(value)
        if value is None or (type(value) is kind and (kind is not float or math.isfinite(value))):
            return value
        raise ValueError(f"{key}={value!r} is not {'a number' if kind is float else f'of type {kind.__name__}'}")


def model_of(config: Any, name: str) -> tuple[Family, ModelConfig]:
    """The family and the architecture that a config.json describes; `name` becomes the name of the model.

    Raises ValueError for a model that mstrain does not have, with the key and value that it lacks.
    """
    family = _family_of(config)
    reader = _Reader(config, family)
    if config.get("quantization_config"):
        raise ValueError("quantization_config: the weights are quantized. Use the folder of the original weights")
    for key, value in family.required.items():
        if (config.get(key, value) or None) != (value or None):
            raise ValueError(f"{key}={config[key]!r} is not supported")
    fields = {field: _value(reader, field, key) for field, key in family.keys.items()}
    for field in ("layers", "width", "heads", "vocab_size", "norm_epsilon"):
        if fields[field] is None:
            raise ValueError(f"{family.keys[field]} is missing")
    if fields.get("context") is None:
        fields.pop("context")
    fields["tied"] = bool(fields["tied"])
    fields |= {"norm_bias": family.fixed["norm"] == "layernorm", "bias": _bias(reader)}
    fields |= _windows(reader, fields["layers"])
    if family.fixed["position"] == "rotary":
        fields |= _rotary(reader, local=fields.get("window") is not None)
    fields |= _attention_scale(reader, fields)
    return family, ModelConfig(name=name, **{**fields, **family.fixed})


def config_of(model: ModelConfig, family: Family) -> dict[str, Any] | None:
    """The config.json of `model` as a model of `family`; None if the family has no such model."""
    inverse = {}
    for field, key in family.keys.items():
        inverse[key] = getattr(model, field)
    activation = family.keys["activation"]
    names = {"gelu_tanh": family.activation, **{name: name for name in ("gelu", "silu", "relu")}}
    inverse[activation] = names[model.activation]
    if "head_dim" not in family.keys and model.heads * model.head_dim != model.width:
        return None
    config = {"model_type": family.model_type, "architectures": [family.architecture], **inverse}
    config |= family.bias.get(model.bias, {}) | _write_windows(model, family)
    if family.fixed["position"] == "rotary":
        config |= _write_rotary(model, family)
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
        f"model {model.name}: no architecture of transformers that mstrain knows has position={model.position}, "
        f"norm={model.norm}, activation={model.activation}, gated={model.gated}, bias={model.bias}, "
        f"parallel_block={model.parallel_block} together. Known: {', '.join(FAMILIES)}."
    )


def differing_fields(one: ModelConfig, other: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """{field: (value in one, value in other)} of all fields that change the function that the models compute."""
    pairs = {field.name: (getattr(one, field.name), getattr(other, field.name)) for field in dataclasses.fields(one)}
    unused = {"name"}
    if one.position == other.position != "learned":
        unused.add("context")
    if one.position == other.position != "rotary":
        unused |= {"rotary_base", "rotary_fraction", "rotary_scaling"}
    if not (one.window or other.window):
        unused |= {"window_pattern", "local_rotary_base"}
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


def _value(reader: _Reader, field: str, key: str) -> Any:
    if field != "activation":
        return reader.get(key, _NUMBERS.get(field, int), 1e-6 if field == "norm_epsilon" else None)
    name = reader.get(key, str, "silu")
    if name not in ACTIVATIONS:
        raise ValueError(f"{key}={name} is not supported. Supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _bias(reader: _Reader) -> str:
    keys = {key for choice in reader.family.bias.values() for key in choice}
    given = {key: bool(reader.get(key, bool, False)) for key in keys}
    for name, choice in reader.family.bias.items():
        if choice == given:
            return name
    raise ValueError(f"{', '.join(f'{key}={value}' for key, value in sorted(given.items()))} is not supported")


def _windows(reader: _Reader, layers: int) -> dict[str, Any]:
    kind = reader.family.window
    used = kind in ("all", "types") or (kind == "last" and reader.get("use_sliding_window", bool, False))
    window = reader.get("sliding_window", int) if used else None
    if window is None:
        return {}
    types = reader.config.get("layer_types") if kind != "all" else None
    if types is not None:
        if not isinstance(types, list) or not set(types) <= {LOCAL, ALL} or len(types) != layers:
            raise ValueError(f"layer_types must have {layers} entries, each {LOCAL} or {ALL}")
        pattern = "".join("L" if name == LOCAL else "G" for name in types)
    elif kind == "last":
        first = reader.get("max_window_layers", int, 28)
        pattern = "G" * min(first, layers) + "L" * (layers - first)
    else:
        every = reader.get("sliding_window_pattern", int) or len(reader.family.pattern)
        pattern = "L" * (every - 1) + "G" if every > 1 else reader.family.pattern
    return {"window": window, "window_pattern": _shortest(pattern)} if "L" in pattern[:layers] else {}


def _shortest(pattern: str) -> str:
    """The shortest prefix of `pattern` that repeats to it."""
    lengths = range(1, len(pattern) + 1)
    return next(pattern[:n] for n in lengths if all(x == pattern[i % n] for i, x in enumerate(pattern)))


def _write_windows(model: ModelConfig, family: Family) -> dict[str, Any]:
    if family.window == "none":
        return {}
    config: dict[str, Any] = {"sliding_window": model.window}
    if family.window != "all":
        config["layer_types"] = [LOCAL if local else ALL for local in model.is_local]
    if family.window == "last":
        first = model.is_local.index(True) if any(model.is_local) else model.layers
        config |= {"use_sliding_window": any(model.is_local), "max_window_layers": first}
    if family.window == "types" and model.window is None:
        config["sliding_window"] = model.context
    return config


def _rotary(reader: _Reader, local: bool) -> dict[str, Any]:
    """Reads `rope_parameters` of transformers 5, for all layers or for each layer type, or the keys before it."""
    parameters = reader.get("rope_parameters", dict)
    old = reader.get("rope_scaling", dict) or {}
    everywhere = parameters if parameters is not None else old
    everywhere = everywhere.get(ALL) or everywhere if ALL in everywhere or LOCAL in everywhere else everywhere
    inner = _Reader(everywhere, reader.family)
    base = inner.get("rope_theta", float) if "rope_theta" in everywhere else reader.get("rope_theta", float)
    fraction = inner.get("partial_rotary_factor", float) or reader.get("partial_rotary_factor", float) or 1.0
    if fraction != 1 and reader.family.model_type != "phi3":
        raise ValueError(f"partial_rotary_factor={fraction:g} is not supported for {reader.family.model_type}")
    found = {"rotary_base": base or 1e4, "rotary_fraction": fraction, "rotary_scaling": _scaling(inner)}
    if local and "rope_local_base_freq" in reader.family.defaults:
        per_type = (parameters or {}).get(LOCAL) or {}
        if per_type.get("rope_type", "default") != "default":
            raise ValueError(f"rope_type={per_type['rope_type']} of {LOCAL} is not supported")
        found["local_rotary_base"] = per_type.get("rope_theta") or reader.get("rope_local_base_freq", float)
    return found


def _scaling(reader: _Reader) -> str | None:
    kind = reader.config.get("rope_type", reader.config.get("type", "default"))
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise ValueError(f"rope_type={kind} is not supported. Supported: default, linear, llama3")
    numbers = [reader.get(key, float) for key in (_LLAMA3 if kind == "llama3" else _LLAMA3[:1])]
    if None in numbers:
        raise ValueError(f"rope_scaling of type {kind} needs {', '.join(_LLAMA3[: len(numbers)])}")
    return ":".join([kind, *(str(int(x)) if x == int(x) else repr(x) for x in numbers)])


def _write_rotary(model: ModelConfig, family: Family) -> dict[str, Any]:
    """The keys that transformers 4 and 5 both read."""
    config: dict[str, Any] = {"rope_theta": model.rotary_base, "rope_scaling": None}
    if model.rotary_scaling:
        kind, *texts = model.rotary_scaling.split(":")
        numbers = [float(text) for text in texts]
        config["rope_scaling"] = {"rope_type": kind, **dict(zip(_LLAMA3, numbers))}
        if kind == "llama3":
            config["rope_scaling"]["original_max_position_embeddings"] = int(numbers[-1])
    if family.model_type == "phi3":
        config["partial_rotary_factor"] = model.rotary_fraction
    if "rope_local_base_freq" in family.defaults:
        config["rope_local_base_freq"] = model.local_rotary_base or model.rotary_base
    return config


def _attention_scale(reader: _Reader, fields: dict[str, Any]) -> dict[str, Any]:
    if "query_pre_attn_scalar" not in reader.family.defaults:
        return {}
    scalar = reader.get("query_pre_attn_scalar", float)
    return {} if scalar == fields["head_dim"] else {"attention_scale": scalar**-0.5}
