"""Keys of a model that its architecture does not read.

A preset or a folder of a hub may set them. Typed on the command line, they would have no effect without a message.
"""

from collections.abc import Callable, Iterable

from mstrain.models.config import ModelConfig

_ROTARY = ("position=rotary", lambda model: model.position == "rotary")
# Field -> what it needs, in words and as a function of the model.
_NEEDS: dict[str, tuple[str, Callable[[ModelConfig], bool]]] = {
    "rotary_base": _ROTARY,
    "rotary_fraction": _ROTARY,
    "rotary_scaling": _ROTARY,
    "local_rotary_base": ("window=N", lambda model: model.window is not None and model.position == "rotary"),
    "window_pattern": ("window=N", lambda model: model.window is not None),
    "qk_norm_whole": ("qk_norm=true", lambda model: model.qk_norm),
    "norm_bias": ("norm=layernorm", lambda model: model.norm == "layernorm"),
}
_OFF = {"norm_bias": False}  # values without an effect that are not the default


def check_typed(model: ModelConfig, arguments: Iterable[str]) -> None:
    """Raises ValueError if one of the `arguments`, "key=value", sets a field that `model` does not read."""
    for argument in arguments:
        group, _, field = argument.partition("=")[0].partition(".")
        if group != "model" or field not in _NEEDS:
            continue
        needed, reads = _NEEDS[field]
        if not reads(model) and getattr(model, field) != _OFF.get(field, getattr(ModelConfig, field)):
            raise ValueError(f"{argument} has no effect on this model. Remove it, or type model.{needed}, too.")
