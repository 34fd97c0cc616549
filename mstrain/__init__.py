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
