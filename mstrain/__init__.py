"""mstrain: transformers trained with two-dimensional tensor parallelism (MeshSlice)."""
