"""mstrain: transformers trained with two-dimensional tensor parallelism (MeshSlice)."""

__version__ = "0.1.0"
