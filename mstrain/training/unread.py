"""Typed keys that the rest of the run does not read.

A preset, a folder of a hub, a plan or the record of a run may set them. Typed on the command line, they would have no
effect without a message.
"""

import functools
from collections.abc import Callable, Iterable

from mstrain.mesh import parse_mesh
from mstrain.models.parallel import layer_algorithms
from mstrain.training.config import RunConfig


def _is_used(half: int):
    """Whether a layer computes half number `half` with the algorithm that the key names."""

    def read(run: RunConfig) -> bool:
        named = (run.parallel.attention, run.parallel.mlp)[half]
        return any(named == layer[half] for layer in layer_algorithms(run.parallel, run.model.layers))

    return read


def _has_several(of):
    """Whether the mesh has several devices by `of`, a function of a `MeshShape`; a mesh that is searched may."""
    return lambda run: run.mesh == "auto" or of(parse_mesh(run.mesh)) > 1


_ROTARY = ("type model.position=rotary", lambda run: run.model.position == "rotary")
_WINDOW = ("type model.window=N", lambda run: run.model.window is not None)
_SAMPLED = (
    "type data= of a text and a mesh= without stages",
    lambda run: run.data.has_tokenizer(run.tokenizer) and (run.mesh == "auto" or parse_mesh(run.mesh).stage == 1),
)
_SAMPLE = (f"{_SAMPLED[0]}, and sample.tokens=100", lambda run: run.sample.tokens > 0 and _SAMPLED[1](run))
_HALF = "change parallel.layers=, which names other algorithms for every layer"
# Key -> what to do for it to have an effect, and whether it has one.
_NEEDS: dict[str, tuple[str, Callable[[RunConfig], bool]]] = {
    "model.rotary_base": _ROTARY,
    "model.rotary_fraction": _ROTARY,
    "model.rotary_scaling": _ROTARY,
    "model.local_rotary_base": (
        "type model.window=N",
        lambda run: run.model.window is not None and run.model.position == "rotary",
    ),
    "model.window_pattern": _WINDOW,
    "model.qk_norm_whole": ("type model.qk_norm=true", lambda run: run.model.qk_norm),
    "model.norm_bias": ("type model.norm=layernorm", lambda run: run.model.norm == "layernorm"),
    "sample.tokens": _SAMPLED,
    "sample.prompt": _SAMPLE,
    "sample.temperature": _SAMPLE,
    "guard.max_rollbacks": ("type guard.rollback=true", lambda run: run.guard.rollback),
    "optimizer.gradients": ("type accumulate=2: one microbatch has no sum", lambda run: run.accumulate > 1),
    "parallel.attention": (_HALF, _is_used(0)),
    "parallel.mlp": (_HALF, _is_used(1)),
    "travel": (
        "type a mesh= whose rows or columns are several devices, such as mesh=2x2",
        _has_several(lambda mesh: mesh.row * mesh.col),
    ),
    "check_replicas.every": (
        "type a mesh= of several devices, such as mesh=2x2",
        _has_several(lambda mesh: mesh.devices),
    ),
}
_OFF = {"model.norm_bias": False, "sample.tokens": 0}  # values without an effect that are not the default


def check_typed(run: RunConfig, arguments: Iterable[str]) -> None:
    """Raises ValueError if one of the `arguments`, "key=value", sets a key that `run` does not read."""
    for argument in arguments:
        key = argument.partition("=")[0]
        if key not in _NEEDS:
            continue
        needed, is_read = _NEEDS[key]
        *group, field = key.split(".")
        owner = functools.reduce(getattr, group, run)
        if not is_read(run) and getattr(owner, field) != _OFF.get(key, getattr(type(owner), field)):
            raise ValueError(f"{argument} has no effect on this run. Remove it, or {needed}.")
