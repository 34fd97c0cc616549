"""Rotary positions of a config.json, in the spellings of transformers 4 and 5."""

import math
from typing import Any

from mstrain.layers.rotary import YARN
from mstrain.models.config import ModelConfig
from mstrain.models.hub.families import Family
from mstrain.models.hub.reader import Reader

LOCAL, ALL = "sliding_attention", "full_attention"
TRAINED = "original_max_position_embeddings"
_NUMBERS = {  # of each rope_type, in the order of `rotary_scaling`
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", TRAINED),
    "yarn": ("factor", "beta_fast", "beta_slow", TRAINED, "attention_factor"),
}


def rotary_of(reader: Reader, local: bool) -> dict[str, Any]:
    """Reads `rope_parameters` of transformers 5, for Gemma 3 of each layer type, or the keys before it."""
    parameters, old = reader.get("rope_parameters", dict), reader.get("rope_scaling", dict) or {}
    if parameters is None:  # null means the default of the family, too
        parameters = reader.family.defaults.get("rope_parameters", {})
    per_type = {name: Reader(parameters, reader.family).get(name, dict) or {} for name in (ALL, LOCAL)}
    if "rope_local_base_freq" in reader.family.defaults:
        if parameters and not parameters.keys() & per_type.keys():
            raise ValueError(f"rope_parameters must have {ALL} and {LOCAL}")
        if "type" in old and "rope_type" not in old:  # transformers 4 reads it, transformers 5 does not
            raise ValueError(f"rope_scaling: type={old['type']} is ambiguous. Write rope_type")
        parameters = per_type[ALL] | old
    elif parameters.keys() & per_type.keys():
        raise ValueError(f"rope_parameters of each layer type are not supported for {reader.family.model_type}")
    else:
        parameters = old or parameters
    inner = Reader(parameters, reader.family)
    base = inner.get("rope_theta", float) if "rope_theta" in parameters else reader.get("rope_theta", float, 1e4)
    fraction = _fraction(reader, inner)
    scaling = _scaling(inner, reader)
    if base is None or base <= 0:
        raise ValueError("rope_theta is missing" if base is None else f"rope_theta={base:g} must be above 0")
    if scaling and reader.family.model_type == "phi3":
        raise ValueError(f"rope_type={scaling.split(':')[0]} is not supported for phi3")
    found = {"rotary_base": base, "rotary_fraction": fraction, "rotary_scaling": scaling}
    if local and "rope_local_base_freq" in reader.family.defaults:
        inner = Reader(per_type[LOCAL], reader.family)
        if _scaling(inner, reader) or _fraction(reader, inner) != fraction:
            raise ValueError(f"rope_parameters: scaling of {LOCAL} is not supported")
        given = inner.get("rope_theta", float) if "rope_theta" in inner.config else None
        found["local_rotary_base"] = given or reader.get("rope_local_base_freq", float)
    return found


def _fraction(reader: Reader, inner: Reader) -> float:
    """The fraction of a head that is rotated, of rope_parameters or config.json."""
    where = inner if inner.config.get("partial_rotary_factor") is not None else reader
    fraction = where.get("partial_rotary_factor", float, 1.0)
    if fraction is not None and fraction != 1 and reader.family.model_type != "phi3":
        raise ValueError(f"partial_rotary_factor={fraction:g} is not supported for {reader.family.model_type}")
    return 1.0 if fraction is None else fraction


def _scaling(reader: Reader, outer: Reader) -> str | None:
    """The scaling of the frequencies that rope_parameters or rope_scaling describe, inside the config `outer`."""
    kind = reader.config.get("rope_type", reader.config.get("type", "default"))
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in _NUMBERS:
        raise ValueError(f"rope_type={kind} is not supported. Supported: default, {', '.join(_NUMBERS)}")
    numbers = {name: reader.get(name, float) for name in _NUMBERS[kind]}
    if TRAINED in numbers:  # transformers prefers the key outside, and takes the context where both are missing
        given = numbers[TRAINED]
        lengths = (outer.get(TRAINED, float), given, outer.get("max_position_embeddings", float))
        numbers[TRAINED] = next((length for length in lengths if length is not None), None)
        if given not in (None, numbers[TRAINED]):
            raise ValueError(f"{TRAINED} has two values, {given:g} and {numbers[TRAINED]:g}")
    if kind == "yarn":
        numbers |= {"beta_fast": numbers["beta_fast"] or 32.0, "beta_slow": numbers["beta_slow"] or 1.0}
        numbers["attention_factor"] = numbers["attention_factor"] or _gain(reader, numbers["factor"] or 1.0)
        kind = "yarn" if reader.get("truncate", bool, True) else "yarn-unrounded"
    if None in numbers.values():
        raise ValueError(f"rope_scaling of type {kind} needs {', '.join(numbers)}")
    return ":".join([kind, *(str(int(x)) if x == int(x) else repr(x) for x in numbers.values() if x is not None)])


def _gain(reader: Reader, factor: float) -> float:
    """YaRN's factor on rotated features where config.json does not give it, as transformers computes it."""
    scale, scale_all = (reader.get(key, float) for key in ("mscale", "mscale_all_dim"))
    if not (scale and scale_all):
        return magnitude(factor)
    return magnitude(factor, scale) / magnitude(factor, scale_all)


def magnitude(factor: float, scale: float = 1.0) -> float:
    """YaRN's growth of scores with the `factor` of the context (Peng et al., 2023, equation 22)."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def write_rotary(model: ModelConfig, family: Family) -> dict[str, Any]:
    """The keys that transformers 4 and 5 both read."""
    config: dict[str, Any] = {"rope_theta": model.rotary_base, "rope_scaling": None}
    if model.rotary_scaling:
        kind, *texts = model.rotary_scaling.split(":")
        name = "yarn" if kind in YARN else kind
        numbers: dict[str, Any] = dict(zip(_NUMBERS[name], map(float, texts)))
        if TRAINED in numbers:
            numbers[TRAINED] = int(numbers[TRAINED])
        truncate = {"truncate": kind == "yarn"} if name == "yarn" else {}
        config["rope_scaling"] = {"rope_type": name, **numbers, **truncate}
        grows = name == "yarn" and numbers["factor"] > 1
        if grows and family.latent and model.attention_scale:  # transformers computes the scale of scores
            growth = (model.attention_scale * model.head_dim**0.5) ** 0.5
            config["rope_scaling"]["mscale_all_dim"] = (growth - 1) / (magnitude(numbers["factor"]) - 1)
    if family.model_type == "phi3":
        config["partial_rotary_factor"] = model.rotary_fraction
    if "rope_local_base_freq" in family.defaults:
        config["rope_local_base_freq"] = model.local_rotary_base or model.rotary_base
    return config
