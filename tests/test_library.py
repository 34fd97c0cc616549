"""mstrain as a library: products of ordinary arrays on a mesh."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import mstrain
from mstrain.gemm import ALGORITHMS

CASES = [
    ("meshslice", "os", "2x4", 2), ("meshslice", "ls", "4x2", 3), ("meshslice", "ls", "2x2x2", None),
    ("collective", "ls", "2x4", None), ("wang", "os", "4x2", None), ("cannon", "os", "2x2", None),
    ("summa", "os", "2x4", None), ("megatron", "ls", "1x8", None), ("fsdp", "os", "8x1", None),
    ("gspmd", "os", "2x4", None),
]  # fmt: skip


@pytest.mark.parametrize("algorithm, dataflow, mesh, slices", CASES)
def test_linear_is_the_product_of_ordinary_arrays_with_its_gradients(algorithm, dataflow, mesh, slices):
    x, w, dy = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(3, 5, 23), (23, 45), (3, 5, 45)]))
    y, pull = jax.vjp(lambda x, w: mstrain.linear(x, w, mesh, algorithm, dataflow=dataflow, slices=slices), x, w)
    dx, dw = pull(dy)
    np.testing.assert_allclose(y, x @ w, atol=2e-5)
    np.testing.assert_allclose(dx, dy @ w.T, atol=2e-5)
    np.testing.assert_allclose(dw, jnp.einsum("bti,bto->io", x, dy), atol=2e-5)
    assert {case[0] for case in CASES} == set(ALGORITHMS)


def test_linear_takes_a_mesh_of_the_caller_within_jit():
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("row", "col"))
    x, w = jnp.ones((4, 6), jnp.bfloat16), jnp.ones((6, 8))
    y = jax.jit(lambda x, w: mstrain.linear(x, w, mesh))(x, w)
    assert y.dtype == jnp.bfloat16 and (y == 6).all() and y.sharding.num_devices == 8


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"w": jnp.ones((5, 8))}, r"x \(4, 6\) times w \(5, 8\)"),
        ({"algorithm": "megatro"}, "megatron"),
        ({"dataflow": "rs"}, "os or ls"),
        ({"slices": 5}, "slice count 5 is illegal"),
        ({"algorithm": "collective", "slices": 2}, "does not slice"),
        ({"algorithm": "cannon"}, "square"),
        ({"mesh": Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("x", "y"))}, "axes"),
    ],
)
def test_linear_says_what_is_not_legal(changes, message):
    arguments = {"x": jnp.ones((4, 6)), "w": jnp.ones((6, 8)), "mesh": "2x4", **changes}
    with pytest.raises(ValueError, match=message):
        mstrain.linear(**arguments)


def test_the_page_multiplies_as_it_says():
    page = (Path(__file__).parent.parent / "docs" / "howto" / "library.md").read_text()
    names = {}
    exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0], names)
    assert names["y"].shape == (4, 128, 384) and (names["y"] == 96).all()
