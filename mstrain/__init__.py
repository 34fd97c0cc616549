"""mstrain: transformers trained with two-dimensional tensor parallelism (MeshSlice)."""

import importlib

__version__ = "0.1.0"


def load(path, *keys: str):
    """(model, params) of a run's newest checkpoint or of a folder in Hugging Face's format.

    Args:
      path: the run_dir of a run, or a folder with config.json and safetensors.
      *keys: keys of train, such as "mesh=2x4" or "seq=512"; one device without `mesh=`.

    `model.apply({"params": params}, tokens)` maps int32 tokens, sequences of `model.seq` one after the other, to
    float32 logits [tokens, vocab_size]. Raises ValueError when there is no model, or when a key is not one of train.
    """
    return importlib.import_module("mstrain.commands.recorded").load_model(path, list(keys))


def linear(x, w, mesh, algorithm: str = "meshslice", **options):
    """`x @ w` by an algorithm of tensor parallelism, for ordinary arrays and differentiable.

    Args:
      x: [..., in], any leading dims.
      w: [in, out].
      mesh: a `jax.sharding.Mesh` with axes `row` and `col`, or text such as "2x4".
      algorithm: meshslice, collective, wang, summa, cannon, megatron, fsdp or gspmd.
      **options: `dataflow` and `slices` of `mstrain.gemm.canonical.multiply`.

    Returns y [..., out] in the dtype of x. Raises ValueError when an argument is not legal.
    """
    return importlib.import_module("mstrain.gemm.canonical").multiply(x, w, mesh, algorithm, **options)


def target_mesh(target: str, mesh: str):
    """A `jax.sharding.Mesh` of the absent devices of a TPU slice: `target_mesh("v5p-64", "4x8")`."""
    return importlib.import_module("mstrain.compiler.function").target_mesh(target, mesh)


def predict(function, *arguments, target: str):
    """Compiles any function of JAX for a TPU slice that is not present and reads its schedule; needs libtpu.

    Args:
      function: `function(*arguments)`, jitted or not.
      *arguments: trees of `jax.ShapeDtypeStruct` with shardings on one mesh of `target_mesh`.
      target: a TPU slice such as "v5p-64".

    Returns a `mstrain.compiler.schedule.Schedule`: `seconds`, `bounds` (low, high), `exposed` seconds of communication,
    `hidden` share of the collectives' time, `memory` in bytes of a device, `timeline`. Raises ValueError when an
    argument has no such sharding, when a device has too little memory, and without libtpu.
    """
    return importlib.import_module("mstrain.compiler.function").predict_function(function, arguments, target)
