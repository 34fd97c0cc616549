"""The dtypes of activations and products by the names that `dtype=` takes."""

import jax.numpy as jnp

DTYPES = ("auto", "bf16", "f32")


def dtype_on(platform: str, name: str):
    """The dtype of activations and products that one of DTYPES names on JAX's `platform`."""
    if name == "auto":
        name = "f32" if platform == "cpu" else "bf16"
    return {"f32": jnp.float32, "bf16": jnp.bfloat16}[name]
