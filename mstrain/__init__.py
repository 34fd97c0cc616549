"""mstrain: transformers trained with two-dimensional tensor parallelism (MeshSlice)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import jax

    from mstrain.commands.trainer import Trainer
    from mstrain.compiler.schedule import CompiledSchedule
    from mstrain.layers.mesh_dense import MeshDense
    from mstrain.models.transformer import Transformer

__version__ = "0.1.0"
__all__ = ["MeshDense", "emulate_devices", "linear", "load", "predict", "target_mesh", "trainer"]


def emulate_devices(count: int) -> None:
    """Splits the CPU into `count` emulated devices, to try a mesh without accelerators. Has no effect on accelerators.

    Call it before the first use of JAX. Raises ValueError when JAX has started with fewer CPU devices.
    """
    mesh = importlib.import_module("mstrain.mesh")
    mesh.emulate_devices(count)
    if mesh.lacks_emulated(count):
        started = importlib.import_module("jax").device_count()
        raise ValueError(
            f"JAX has started with {started} CPU devices. Call emulate_devices({count}) before the first use of JAX."
        )


def load(path: str | Path, *keys: str) -> tuple[Transformer, dict[str, Any]]:
    """(model, params) of a run's newest checkpoint or of a folder in Hugging Face's format.

    Args:
      path: the run_dir of a run, or a folder with config.json and safetensors.
      *keys: keys of train, such as "mesh=2x4" or "seq=512"; one device without `mesh=`.

    `model.apply({"params": params}, tokens)` maps int32 tokens, sequences of `model.seq` one after the other, to
    float32 logits [tokens, vocab_size]. Raises ValueError without a model, and for a key that is not one of train.
    """
    return importlib.import_module("mstrain.commands.recorded").load_model(path, list(keys))


def trainer(*keys: str) -> Trainer:
    """(state, step, feed) for a training loop of one's own.

    Args:
      *keys: keys of train, such as "model=tiny", "mesh=2x4" or "init=FOLDER". "run_dir=RUN" takes the configuration
        of that run and the state of its newest checkpoint.

    `step(state, batch)` returns (state, metrics): it is compiled, and donates its argument `state`. The batch is
    `feed(k)` (batch k of `data=`, k from 0) or tokens of one's own, int [batch, seq + 1]. `state` is a tree of
    `jax.Array`s with the keys `step`, `params` and `optimizer`; metrics are the float32 scalars `loss`, `grad_norm` and
    `skipped`. Nothing is written into run_dir. Raises ValueError as the command does.
    """
    return importlib.import_module("mstrain.commands.trainer").make_trainer(list(keys))


def linear(
    x: jax.Array, w: jax.Array, mesh: jax.sharding.Mesh | str, algorithm: str = "meshslice", *,
    dataflow: str = "os", slices: int | None = None,
) -> jax.Array:  # fmt: skip
    """`x @ w` by an algorithm of tensor parallelism, for ordinary arrays; differentiable, inside `jax.jit` or outside.

    Args:
      x: [..., in], any leading dims; its dtype is that of the product.
      w: [in, out], any float dtype.
      mesh: a `jax.sharding.Mesh` with axes `row` and `col`, and `data` or `replica` in front of them, or text such as
        "2x4".
      algorithm: meshslice, collective, wang, summa, cannon, megatron, fsdp or gspmd.
      dataflow: `os` (y is stationary) or `ls` (x is stationary).
      slices: slice count of meshslice; by default 4, or the most that the sizes support, and 1 on CPUs.

    Returns y [..., out] in the dtype of x. Sizes that do not divide are padded within the product. Raises ValueError
    when an argument is not legal.
    """
    return importlib.import_module("mstrain.gemm.canonical").multiply(x, w, mesh, algorithm, dataflow, slices)


def target_mesh(target: str, mesh: str) -> jax.sharding.Mesh:
    """A `jax.sharding.Mesh` of the absent devices of a TPU slice: `target_mesh("v5p-64", "4x8")`.

    It has axes `row` and `col`, and `replica` and `data` of size 1; a mesh of one's own may be made of its `devices`.
    Raises ValueError for an unknown slice, a mesh that does not fit, and without the TPU compiler (libtpu).
    """
    return importlib.import_module("mstrain.compiler.function").target_mesh(target, mesh)


def predict(function: Callable[..., Any], *arguments: Any, target: str) -> CompiledSchedule:
    """Compiles any function of JAX for a TPU slice that is not present and reads its schedule; needs libtpu.

    Args:
      function: `function(*arguments)`, jitted or not.
      *arguments: trees of `jax.ShapeDtypeStruct` with shardings on one mesh of `target_mesh`.
      target: a TPU slice such as "v5p-64".

    Returns a `mstrain.compiler.schedule.CompiledSchedule`: `seconds`, `bounds` (low, high), `exposed` seconds of
    communication, `hidden` share of the collectives' time, `memory` in bytes of a device, `timeline`. Raises ValueError
    when an argument has no such sharding, when a device has too little memory, and without libtpu.
    """
    return importlib.import_module("mstrain.compiler.function").predict_function(function, arguments, target)


if not TYPE_CHECKING:

    def __getattr__(name: str):
        if name == "MeshDense":  # its import takes seconds, which a command that does not need it saves
            return importlib.import_module("mstrain.layers.mesh_dense").MeshDense
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
